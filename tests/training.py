"""A plain Trainer run on one rank of a job, and what is compared of it."""

import shutil
import tempfile

import torch
from transformers import Trainer, TrainingArguments

from hf_striped import StripedDataCollator, StripedParallelismConfig
from tests.models import tiny_llama


def train(
    rank: int,
    world: int,
    rows: list[dict],
    cp_size: int,
    *,
    model=tiny_llama,
    striped: bool = True,
    collator=None,
    trainer_class=Trainer,
    prepare=None,
    eval_rows=None,
    callbacks=None,
    resume=None,
    config=None,
    **arguments,
) -> dict:
    """Train and report losses, gradient norms, weights, and the Trainer's own counts."""
    folder = tempfile.mkdtemp()
    fields = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "max_grad_norm": 100.0,
        "seed": 7,
    }
    if striped:
        fields["parallelism_config"] = StripedParallelismConfig(cp_size, **(config or {}))
        collator = StripedDataCollator(collator)
    network = model("striped_ring" if striped else "sdpa")
    try:
        trainer = trainer_class(
            model=network,
            args=TrainingArguments(**{**fields, **arguments}),
            train_dataset=rows,
            eval_dataset=eval_rows,
            data_collator=collator,
            callbacks=callbacks,
        )
        if prepare is not None:
            prepare(trainer)
        trainer.train(resume_from_checkpoint=resume)
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "losses": [entry["loss"] for entry in history],
            "grad_norms": [float(entry["grad_norm"]) for entry in history],
            "weights": {name: full(parameter) for name, parameter in network.named_parameters()},
            "steps": trainer.state.global_step,
            "epoch": trainer.state.epoch,
            "best": trainer.state.best_model_checkpoint or "",
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "total_batch_size": trainer.get_total_train_batch_size(trainer.args),
            "eval_loss": trainer.evaluate()["eval_loss"] if eval_rows else None,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def full(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def assert_same_run(run: dict, reference: dict) -> None:
    """Losses, gradient norms and weights of two runs agree to the project's tolerances."""
    torch.testing.assert_close(run["losses"], reference["losses"], atol=1e-4, rtol=0)
    torch.testing.assert_close(run["grad_norms"], reference["grad_norms"], atol=0, rtol=1e-4)
    for name, weight in reference["weights"].items():
        scale = weight.abs().max().item()
        torch.testing.assert_close(run["weights"][name], weight, atol=1e-5 * scale, rtol=0)
