"""The errors a user can cause. Each message states the rule, the values received and the fix."""


class StripedError(ValueError):
    """Base class of the errors of hf_striped: one `except` for all of them.

    Each is a `ValueError` too, and its message states the rule, what was received and the fix.

    Example:
        >>> import torch, hf_striped
        >>> try:
        ...     hf_striped.stripe(torch.arange(5), dim=0, cp_size=2, cp_rank=0)
        ... except hf_striped.StripedError as error:
        ...     print(type(error).__name__)
        BatchError
    """


class UnsupportedFeatureError(StripedError):
    """A feature of the model, the Trainer or the batch that would not be exact on stripes.

    It is refused by name: a layer that mixes tokens by other means than attention, a custom mask, a loss
    that is computed outside the model.
    """


class BatchError(StripedError):
    """A batch that cannot be striped, or a striped batch that does not fit its ranks.

    A length that the ranks do not divide, shapes that do not fit together, keys that name different
    documents, ranks of a group with different batches.
    """


class ConfigurationError(StripedError):
    """A set-up that cannot work: sizes, groups, options, or a missing piece.

    Most are raised before the first step: when a config, a collator or a Trainer is made, or when training
    starts.
    """


class KernelUnavailableError(StripedError):
    """A block kernel that cannot run here, or a name that is no kernel's; the message says why."""
