"""Gradient checkpointing that keeps attention: the ring's output and log-sum-exp are not computed twice.

Recomputing a layer would run its forward ring again, with all its communication. Its output and log-sum-exp
are as large as the layer's input: keeping them too is what a selective checkpoint policy does.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_striped.errors import ConfigurationError


def keep_attention() -> tuple[Any, Any]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` that keeps what striped attention returns.

    A layer's forward ring then runs once a step, not twice; its output and log-sum-exp stay in memory. For a
    loop of your own; with a Trainer it is `StripedParallelismConfig(keep_attention=True)`. For all layers of a model:
    `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": hf_striped.keep_attention})`.

    Returns:
        The context managers of the forward pass and of the recomputation.

    Source: selective checkpointing, https://docs.pytorch.org/docs/stable/checkpoint.html.

    Example:
        >>> import torch, hf_striped
        >>> from torch.utils.checkpoint import checkpoint
        >>> def layer(x):
        ...     return hf_striped.striped_ring_attention(x, x, x, group=None)
        >>> x = torch.randn(1, 2, 8, 16, requires_grad=True)
        >>> out = checkpoint(layer, x, use_reentrant=False, context_fn=hf_striped.keep_attention)
        >>> out.sum().backward()
    """
    return create_selective_checkpoint_contexts([torch.ops.hf_striped.ring_attention.default])


def keep_attention_in_checkpoints(model: nn.Module) -> None:
    """Let the layers of `model` that checkpoint keep attention; without checkpointing nothing is recomputed.

    Raises:
        ConfigurationError: checkpointing is reentrant, which takes no policy.
    """
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if not isinstance(function, partial):
            continue
        if function.keywords.get("use_reentrant", True):
            raise ConfigurationError(
                "keep_attention needs gradient checkpointing that is not reentrant; received use_reentrant=True. "
                'Pass activation_checkpointing_kwargs={"use_reentrant": False}.'
            )
        module._gradient_checkpointing_func = partial(function, context_fn=keep_attention)
