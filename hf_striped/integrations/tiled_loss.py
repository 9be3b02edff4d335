"""The loss of a long sequence without its logits: head and loss run tile by tile, recomputed in backward.

Logits `[batch, seq, vocab]` in fp32 dominate the memory of long sequences. Whatever a model does between
its last hidden state and its loss (scaling, softcaps, biases) is in its own `forward`, so that is what runs
on each tile, its backbone replaced by one that returns the tile's hidden states. One tile's logits are alive.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from hf_striped.errors import UnsupportedFeatureError
from hf_striped.integrations.predictions import whole_rows_wanted, withhold_logits
from hf_striped.integrations.transformers import CU_SEQLENS_KEY

_ATTRIBUTE = "_striped_tiled_loss"


def tile_loss(model: nn.Module, tile_size: int) -> None:
    """Let `model` compute the loss of striped batches in tiles of at most `tile_size` tokens.

    Args:
        model: a causal language model, or a PEFT model of one.
        tile_size: tokens of a tile, over all rows of a batch.

    Raises:
        UnsupportedFeatureError: a model whose backbone cannot be told from its head.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, _ATTRIBUTE, None) is not None:
        getattr(base, _ATTRIBUTE).tile_size = tile_size
        return
    backbone = getattr(base, "base_model", None)
    if backbone is None or backbone is base:
        raise UnsupportedFeatureError(
            f"loss_tile_size needs a model with a backbone and a head; received {type(base).__name__}, which has "
            "no backbone of its own. Leave loss_tile_size unset."
        )
    tiled = TiledLoss(base, tile_size)
    setattr(base, _ATTRIBUTE, tiled)

    @wraps(type(base).forward)  # the Trainer reads its signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tiled.forward(self, *args, **kwargs)

    base.forward = MethodType(forward, base)


class TiledLoss:
    """The forward pass of a model with a tiled loss."""

    def __init__(self, model: nn.Module, tile_size: int):
        self.tile_size = tile_size
        self._whole_forward = model.forward

    def forward(
        self,
        model: nn.Module,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output with its loss, and without logits, for a striped batch with labels."""
        has_own_tiles = kwargs.get("fused_lm_head", False)  # of TRL's SFTTrainer
        striped = CU_SEQLENS_KEY in kwargs and shift_labels is not None and labels is not None
        if not striped or whole_rows_wanted() or has_own_tiles:
            given = {
                "labels": labels,
                "shift_labels": shift_labels,
                "num_items_in_batch": num_items_in_batch,
            }
            kwargs |= {key: value for key, value in given.items() if value is not None}
            return self._whole_forward(*args, **kwargs)
        hidden, output = self._run_backbone(model, args, {**kwargs, "return_dict": True})
        loss_function = (
            model.loss_function
        )  # of now: tiles are recomputed when it may have changed back
        total = torch.zeros((), device=hidden.device)
        tiles = zip(*(self._tiles(tensor) for tensor in (hidden, shift_labels)), strict=True)
        for hidden_tile, label_tile in tiles:
            total = total + checkpoint(
                self.loss_of, model, loss_function, hidden_tile, label_tile, use_reentrant=False
            )
        count = num_items_in_batch
        count = (shift_labels != -100).sum() if count is None else count
        output["loss"] = total / torch.as_tensor(count, device=total.device)
        return withhold_logits(output)

    def _run_backbone(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        """The last hidden state `[batch, seq, hidden]`, and the output of a head that saw no token."""
        whole = []

        def keep(backbone: nn.Module, args: tuple, output: Any) -> Any:
            whole.append(output.last_hidden_state)
            output["last_hidden_state"] = whole[0][:, :0]
            return output

        handle = model.base_model.register_forward_hook(keep)
        try:
            output = self._whole_forward(*args, **kwargs)
        finally:
            handle.remove()
        return whole[0], output

    def _tiles(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """`[batch, seq, ...]` as tiles `[1, tile, ...]` of the flattened row."""
        return tensor.flatten(0, 1).unsqueeze(0).split(self.tile_size, 1)

    def loss_of(
        self, model: nn.Module, loss_function: Callable, hidden: Tensor, labels: Tensor
    ) -> Tensor:
        """The summed loss of one tile, by the model's own head and loss."""
        with (
            _backbone_that_returns(model, hidden),
            _without_hooks(model.get_output_embeddings()),
            with_loss_function(model, loss_function),
        ):
            output = self._whole_forward(
                inputs_embeds=hidden, labels=labels, shift_labels=labels, num_items_in_batch=1
            )
        return output["loss"].float()


@contextmanager
def with_loss_function(model: nn.Module, loss_function: Callable):
    """Within: the causal language model `model` computes its loss by `loss_function`."""
    own = vars(model).get("_loss_function")
    model.loss_function = loss_function
    try:
        yield
    finally:
        del model._loss_function
        if own is not None:
            model.loss_function = own


@contextmanager
def _backbone_that_returns(model: nn.Module, hidden: Tensor):
    """Within: the backbone returns the hidden states `hidden`, whatever it is given."""
    backbone = model.base_model
    forward = vars(backbone).get("forward")  # another tool's, if it has put one there
    backbone.forward = lambda *args, **kwargs: MoeModelOutputWithPast(last_hidden_state=hidden)
    try:
        yield
    finally:
        del backbone.forward
        if forward is not None:
            backbone.forward = forward


@contextmanager
def _without_hooks(head: nn.Module):
    """Within: the head runs as often as there are tiles. FSDP2's hooks on it, which ran once before and left
    its weight whole until the backward pass ends, are for one call.
    """
    before, after = head._forward_pre_hooks, head._forward_hooks
    head._forward_pre_hooks, head._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        head._forward_pre_hooks, head._forward_hooks = before, after
