"""Attention heads exchanged for tokens: the inner dimension of heads x ring.

With P = U * R ranks, rank u * R + i holds the tokens g with g mod P = u * R + i. The U ranks of one i hold
together the tokens with g mod R = i: a stripe of modulus R, their local tokens interleaved by u. After an
all-to-all each of them holds that whole stripe for 1/U of the heads, and the ring of size R runs on it
unchanged.

    tokens: [local_tokens, heads, head_dim]            this rank's tokens, all heads
    heads:  [local_tokens * U, heads / U, head_dim]    the stripe of modulus R, this rank's heads
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hf_striped.context import ContextParallel
from hf_striped.meter import ATTENTION, WAITING, count_sent, measured


@torch.library.custom_op("hf_striped::tokens_to_heads", mutates_args=())
def tokens_to_heads(tokens: Tensor, group_name: str) -> Tensor:
    """Give away heads, take tokens."""
    cp = ContextParallel.from_group_name(group_name)
    sent = torch.stack(tokens.chunk(cp.size, 1))  # [U, local_tokens, heads / U, head_dim]
    return _all_to_all(sent, cp).transpose(0, 1).flatten(0, 1).contiguous()


@torch.library.custom_op("hf_striped::heads_to_tokens", mutates_args=())
def heads_to_tokens(heads: Tensor, group_name: str) -> Tensor:
    """The inverse of `tokens_to_heads`."""
    cp = ContextParallel.from_group_name(group_name)
    sent = heads.unflatten(0, (-1, cp.size)).transpose(0, 1).contiguous()
    return torch.cat(_all_to_all(sent, cp).unbind(0), 1)


def _all_to_all(sent: Tensor, cp: ContextParallel) -> Tensor:
    received = torch.empty_like(sent)
    count_sent(sent[0], cp.size - 1)
    with measured("heads exchange", sent.device, ATTENTION, WAITING):
        dist.all_to_all_single(received, sent, group=cp.group)
    return received


@tokens_to_heads.register_fake
def _(tokens, group_name):
    size = ContextParallel.from_group_name(group_name).size
    count, heads, width = tokens.shape
    return tokens.new_empty((count * size, heads // size, width))


@heads_to_tokens.register_fake
def _(heads, group_name):
    size = ContextParallel.from_group_name(group_name).size
    count, held, width = heads.shape
    return heads.new_empty((count // size, held * size, width))


def _keep_group(ctx, inputs, output):
    ctx.group_name = inputs[1]


tokens_to_heads.register_autograd(
    lambda ctx, gradient: (heads_to_tokens(gradient.contiguous(), ctx.group_name), None),
    setup_context=_keep_group,
)
heads_to_tokens.register_autograd(
    lambda ctx, gradient: (tokens_to_heads(gradient.contiguous(), ctx.group_name), None),
    setup_context=_keep_group,
)


def repeat_key_heads(tensor: Tensor, size: int) -> Tensor:
    """Key or value heads `[tokens, key_heads, head_dim]`, repeated where there are fewer than ranks."""
    return tensor.repeat_interleave(max(1, size // tensor.shape[1]), 1)


def why_heads_cannot_split(query_heads: int, key_heads: int, size: int) -> str | None:
    """Why `size` ranks cannot share these heads, or None if they can."""
    if query_heads % size:
        return f"{query_heads} query heads are not a multiple of {size}"
    if key_heads % size and size % key_heads:
        return f"neither of {key_heads} key heads and {size} is a multiple of the other"
    return None
