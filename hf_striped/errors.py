"""The errors a user can cause. Each message states the rule, the values received and the fix."""


class StripedError(ValueError):
    """Base class of every error raised by hf_striped."""


class UnsupportedFeatureError(StripedError):
    """A feature of the model or of the batch that striped attention refuses by name."""


class BatchError(StripedError):
    """A batch that cannot be striped, or a striped batch that does not fit its ranks."""


class ConfigurationError(StripedError):
    """A parallelism set-up that cannot work: sizes, groups, or a missing piece."""


class KernelUnavailableError(StripedError):
    """A requested block kernel that cannot run here; the message says why."""
