"""Predictions, metrics and label smoothing over stripes are those of one process."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_striped import (
    StripedDataCollator,
    StripedParallelismConfig,
    StripedTrainer,
    StripedTrainerMixin,
)
from tests.models import tiny_llama, token_rows
from tests.ranks import RankError
from tests.training import assert_same_run, train


def pad_right(features):
    longest = max(len(feature["input_ids"]) for feature in features)

    def rows(key, fill):
        padded = [f[key] + [fill] * (longest - len(f[key])) for f in features]
        return torch.tensor(padded)

    mask = [[1] * len(f["input_ids"]) for f in features]
    return {
        "input_ids": rows("input_ids", 0),
        "attention_mask": torch.tensor([m + [0] * (longest - len(m)) for m in mask]),
        "labels": rows("labels", -100),
    }


def uneven_rows():
    """Seven rows of other lengths, some prompts without labels, one row with no label at all."""
    rows = token_rows(7, 13)
    lengths = [13, 5, 11, 7, 4, 9, 2]
    rows = [{"input_ids": r["input_ids"][:n]} for r, n in zip(rows, lengths, strict=True)]
    return [
        {**row, "labels": [-100] * skip + row["input_ids"][skip:]}
        for row, skip in zip(rows, [0, 3, 1, 7, 2, 0, 1], strict=True)
    ]


def metrics(prediction):
    predicted, labels = prediction.predictions, prediction.label_ids
    shown = {"rows": len(labels), "length": labels.shape[1]}
    if prediction.inputs is not None:
        shown["input_sum"] = int(np.maximum(prediction.inputs, 0).sum())
    right = predicted[:, :-1] == labels[:, 1:]
    return {**shown, "accuracy": (right & (labels[:, 1:] != -100)).mean()}


def argmax(logits, labels):
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1)


class MyTrainer(StripedTrainerMixin, Trainer):
    pass


def evaluate(rank, world, rows, cp_size, trainer_class=StripedTrainer, striped=True, **changes):
    with_metrics, config = changes.pop("with_metrics", True), changes.pop("config", {})
    collator = pad_right
    if striped:
        collator = StripedDataCollator(pad_right)
        changes["parallelism_config"] = StripedParallelismConfig(cp_size, **config)
    arguments = TrainingArguments(
        "unused",
        use_cpu=True,
        per_device_eval_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        **changes,
    )
    trainer = trainer_class(
        tiny_llama("striped_ring" if striped else "sdpa"),
        arguments,
        eval_dataset=rows,
        data_collator=collator,
        **(
            {"compute_metrics": metrics, "preprocess_logits_for_metrics": argmax}
            if with_metrics
            else {}
        ),
    )
    reported = trainer.evaluate()
    predicted = trainer.predict(rows)
    timing = ("runtime", "per_second", "preparation_time")
    return {
        "metrics": {k: v for k, v in reported.items() if not any(t in k for t in timing)},
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
    }


@pytest.mark.parametrize(
    ("world", "cp_size", "trainer_class"),
    [
        (1, 1, StripedTrainer),
        (2, 2, StripedTrainer),
        (4, 4, StripedTrainer),
        (4, 2, MyTrainer),
    ],
)
def test_metrics_see_rows_in_dataset_order_and_tokens_in_natural_order(
    ranks, world, cp_size, trainer_class
):
    """Seven rows in batches of two, lengths that no group size divides."""
    options = {"include_for_metrics": ["inputs"], "trainer_class": trainer_class}
    plain = {**options, "trainer_class": Trainer}
    reference = ranks.run(
        world // cp_size, partial(evaluate, striped=False, **plain), uneven_rows(), 1
    )[0]
    for run in ranks.run(world, partial(evaluate, **options), uneven_rows(), cp_size):
        assert run["metrics"] == pytest.approx(reference["metrics"], abs=1e-4)
        np.testing.assert_array_equal(run["labels"], reference["labels"])
        assert run["predictions"].shape == reference["predictions"].shape
        real = reference["labels"] != -100
        np.testing.assert_array_equal(run["predictions"][real], reference["predictions"][real])


def test_predicted_logits_equal_one_process(ranks):
    plain = partial(evaluate, striped=False, trainer_class=Trainer, with_metrics=False)
    (reference,) = ranks.run(1, plain, uneven_rows(), 1)
    for run in ranks.run(2, partial(evaluate, with_metrics=False), uneven_rows(), 2):
        assert run["predictions"].shape == reference["predictions"].shape == (7, 13, 64)
        for row, expected, source in zip(
            run["predictions"], reference["predictions"], uneven_rows(), strict=True
        ):
            length = len(source["input_ids"])
            np.testing.assert_allclose(row[:length], expected[:length], atol=1e-4)


def evaluate_with_options(rank, world, rows, cp_size, striped=True, **options):
    return evaluate(rank, world, rows, cp_size, striped=striped, **options)["metrics"]


@pytest.mark.parametrize("filtered", [True, False])
def test_eval_loss_of_batches_without_labels_is_that_of_one_process(ranks, filtered):
    """The last batch has no supervised token: 0/0, filtered from the mean or not."""
    rows = uneven_rows()
    rows = [*rows[:6], rows[3], rows[3]]  # row 3 has no label
    options = {"logging_nan_inf_filter": filtered, "with_metrics": False}
    plain = partial(evaluate_with_options, striped=False, trainer_class=Trainer, **options)
    (reference,) = ranks.run(1, plain, rows, 1)
    assert np.isnan(reference["eval_loss"]) != filtered
    for trainer_class in (Trainer, StripedTrainer):
        if trainer_class is Trainer:
            run = partial(eval_loss_alone, logging_nan_inf_filter=filtered)
        else:
            run = partial(evaluate_with_options, **options)
        for found in ranks.run(2, run, rows, 2):
            assert found["eval_loss"] == pytest.approx(
                reference["eval_loss"], abs=1e-4, nan_ok=True
            )


def eval_loss_alone(rank, world, rows, cp_size, **changes):
    trainer = Trainer(
        tiny_llama("striped_ring"),
        TrainingArguments(
            "unused",
            use_cpu=True,
            per_device_eval_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            parallelism_config=StripedParallelismConfig(cp_size),
            **changes,
        ),
        eval_dataset=rows,
        data_collator=StripedDataCollator(pad_right),
    )
    return trainer.evaluate(metric_key_prefix="eval")


@pytest.mark.parametrize(("world", "cp_size"), [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("average", [True, False])
def test_label_smoothing_of_a_striped_trainer_equals_one_process(ranks, world, cp_size, average):
    rows = token_rows(12, 9)
    options = {
        "label_smoothing_factor": 0.2,
        "gradient_accumulation_steps": 2,
        "average_tokens_across_devices": average,
        "eval_rows": rows[:3],
    }
    reference = ranks.run(world // cp_size, partial(train, striped=False, **options), rows, 1)[0]
    run = partial(train, trainer_class=StripedTrainer, **options)
    for result in ranks.run(world, run, rows, cp_size):
        assert_same_run(result, reference)
        assert result["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-4)


class ReadsTheLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.seen = float(loss)
        return (loss, outputs) if return_outputs else loss


class ReadsLogits(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class ReadsThemAnyway(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs[1].square().mean()
        return (loss, outputs) if return_outputs else loss


class HasALoss(Trainer):
    def __init__(self, **kwargs):
        super().__init__(
            compute_loss_func=lambda outputs, labels, **_: outputs.logits.sum(), **kwargs
        )


def test_a_compute_loss_that_takes_the_models_loss_trains_as_ever(ranks):
    rows = token_rows(6, 9)
    (reference,) = ranks.run(1, partial(train, striped=False), rows, 1)
    for run in ranks.run(2, partial(train, trainer_class=ReadsTheLoss), rows, 2):
        assert_same_run(run, reference)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1.*StripedTrainer"),
        ({"trainer_class": HasALoss}, "compute_loss_func="),
        ({"trainer_class": ReadsLogits}, r"ReadsLogits\.compute_loss, which reads logits"),
        ({"trainer_class": ReadsThemAnyway}, "compute no loss of your own from logits"),
    ],
)
def test_a_loss_outside_of_the_model_is_refused_on_every_rank(ranks, world, options, message):
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(world, partial(train, **options), token_rows(4, 8), world)
    assert caught.value.kinds == dict.fromkeys(range(world), "UnsupportedFeatureError")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("with_metrics", [True, False])
def test_a_plain_trainer_says_that_it_cannot_predict(ranks, world, with_metrics):
    run = partial(evaluate, trainer_class=Trainer, with_metrics=with_metrics)
    with pytest.raises(RankError, match=r"hf_striped\.StripedTrainer") as caught:
        ranks.run(world, run, uneven_rows(), world)
    assert caught.value.kinds == dict.fromkeys(range(world), "UnsupportedFeatureError")
