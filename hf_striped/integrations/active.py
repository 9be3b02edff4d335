"""What is active in this process: its parallelism config, its group, and what must not be on beside them."""

from accelerate import ParallelismConfig
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, GradientState

from hf_striped.context import ContextParallel
from hf_striped.errors import ConfigurationError
from hf_striped.exchange import RING
from hf_striped.integrations.accelerate import StripedParallelismConfig
from hf_striped.kernels import AUTO


def active_config() -> ParallelismConfig | None:
    """The parallelism config of this process's Accelerator, if there is one.

    Raises:
        ConfigurationError: it is Accelerate's own context or sequence parallelism.
    """
    config = AcceleratorState._shared_state.get("parallelism_config")
    if config is not None and (config.cp_enabled or config.sp_enabled):
        raise ConfigurationError(
            "Accelerate's own sequence splitting is on, and striping would split each sequence twice; "
            f"received ParallelismConfig(cp_size={config.cp_size}, sp_size={config.sp_size}). "
            f"Pass StripedParallelismConfig(context_parallel_size={config.cp_size * config.sp_size}) instead."
        )
    return config


def active_context() -> ContextParallel | None:
    """This process's context-parallel group as Accelerate's mesh has it; None when nothing is striped."""
    config = active_config()
    return config.context if isinstance(config, StripedParallelismConfig) else None


def check_not_dispatched() -> None:
    """Raise `ConfigurationError` while the main process collates the batches of all others.

    It would stripe them for its own rank, and Accelerate would cut them once more by rows.
    """
    if isinstance(GradientState().active_dataloader, DataLoaderDispatcher):
        raise ConfigurationError(
            "Each rank must collate its own stripe, and Accelerate's dispatch_batches (its default for an "
            "IterableDataset) collates on the main process for all. Pass "
            'accelerator_config={"dispatch_batches": False} to TrainingArguments, or '
            "DataLoaderConfiguration(dispatch_batches=False) to Accelerator."
        )


def check_heads_shared(cp: ContextParallel | None) -> None:
    """Raise `ConfigurationError` if heads were to be shared and no groups were made for it."""
    asked = getattr(active_config(), "heads_parallel_size", None) or 1
    if cp is not None and asked > 1 and cp.heads_group is None:
        raise ConfigurationError(
            "The groups of ranks that share heads are made for a model; received "
            f"heads_parallel_size={asked} and a model that has not been prepared. Call "
            "hf_striped.prepare_model(model) once (a Trainer does)."
        )


def active_choices() -> dict[str, str]:
    """The block kernel and the exchange that this process's config names."""
    config = active_config()
    return {
        "kernel": getattr(config, "kernel", AUTO),
        "exchange": getattr(config, "exchange", RING),
    }
