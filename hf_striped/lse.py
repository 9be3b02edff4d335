"""The one merge of partial attention results.

out: [tokens, heads, value_head_dim]   fp32 (fp64 for fp64 inputs)
lse: [tokens, heads]                   natural log, same type; -inf where no key was seen
"""

import torch
from torch import Tensor


def merge_partial_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge one block's normalised output into the running one, in place.

    Both `lse` and `block_lse` may be -inf: the result stays finite (out) or -inf (lse), never NaN.

    Args:
        out: running output, updated in place.
        lse: running log-sum-exp, updated in place.
        block_out: the block's own normalised output, same shape, any floating type.
        block_lse: the block's log-sum-exp, same shape as `lse`.

    Source: the online softmax of FlashAttention, arXiv 2307.08691; docs/explanation/online-softmax.md.
    """
    # exp(lse_block - lse_merged); NaN only where neither has seen a key, and there it counts nothing
    weight = torch.sigmoid(block_lse - lse).nan_to_num_(nan=0.0)
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)
