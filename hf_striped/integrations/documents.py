"""What the documents of a natural-order batch are, from whatever its collator says about them.

    real:   bool [batch, seq]   False on padding
    starts: bool [batch, seq]   True where a document, or a run of padding, begins

The sources, each optional: `attention_mask` (padding), `position_ids` that do not go up by one,
`seq_idx` that changes, `cu_seq_lens_q` over the flattened row. Sources that contradict one another
are refused: none is silently preferred.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_striped.errors import BatchError, UnsupportedFeatureError

# keys that describe documents; consumed here, replaced by one key on the striped batch
DOCUMENT_KEYS = frozenset(
    ["attention_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
)


def real_tokens(batch: Mapping, shape: tuple[int, int]) -> Tensor:
    """Where `attention_mask` says a token is real; everywhere without one."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    if mask.ndim != 2:
        raise UnsupportedFeatureError(
            "StripedDataCollator takes an attention_mask [batch, seq] of 0 and 1; received a custom mask "
            f"of shape {tuple(mask.shape)}. Express documents by position_ids, seq_idx or cu_seq_lens_q."
        )
    _check_shape("attention_mask", mask, shape)
    if not ((mask == 0) | (mask == 1)).all():
        raise UnsupportedFeatureError(
            "StripedDataCollator takes an attention_mask of 0 and 1; received the values "
            f"{mask.unique().tolist()[:8]}. Express documents by position_ids, seq_idx or cu_seq_lens_q."
        )
    return mask.bool()


def document_starts(batch: Mapping, real: Tensor) -> Tensor:
    """Where documents and runs of padding begin.

    Raises:
        BatchError: two sources contradict one another.
        UnsupportedFeatureError: padding inside a document, or position_ids of another kind.
    """
    row_starts = torch.zeros_like(real)
    row_starts[:, 0] = True
    explicit = _explicit_starts(batch, row_starts)
    by_position = _position_starts(batch, real)
    if explicit is not None:
        if bool((by_position & ~explicit & ~row_starts & real).any()):
            row, column = (by_position & ~explicit & ~row_starts & real).nonzero()[0].tolist()
            raise BatchError(
                "position_ids restart inside a document that cu_seq_lens_q or seq_idx calls one; received "
                f"such a restart at row {row}, token {column}. Make the collator's keys agree."
            )
        documents = explicit | row_starts
    else:
        documents = by_position | row_starts
    change = torch.zeros_like(real)
    change[:, 1:] = real[:, 1:] != real[:, :-1]
    seen_real = (real.cumsum(1) - real.long()) > 0
    hole = change & real & seen_real & ~documents
    if bool(hole.any()):
        row, column = hole.nonzero()[0].tolist()
        raise UnsupportedFeatureError(
            "Padding must lie before, after or between documents, not inside one; attention_mask goes from 0 "
            f"back to 1 at row {row}, token {column}, within a document. Move the padding to an end of the "
            "row, or let position_ids restart after it."
        )
    return torch.where(real, documents | change, change | row_starts)


def _explicit_starts(batch: Mapping, row_starts: Tensor) -> Tensor | None:
    found = None
    for key in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if batch.get(key) is None:
            continue
        value = torch.as_tensor(batch[key])
        if key == "seq_idx":
            _check_shape(key, value, tuple(row_starts.shape))
            starts = row_starts.clone()
            starts[:, 1:] = value[:, 1:] != value[:, :-1]
        else:
            starts = _starts_from_cu_seq_lens(key, value.flatten(), row_starts)
        if found is not None and not torch.equal(starts, found[1]):
            raise BatchError(
                f"{found[0]} and {key} must name the same documents; received a batch in which they differ. "
                "Let the collator write one of them, or make them agree."
            )
        found = key, starts
    return found[1] if found is not None else None


def _starts_from_cu_seq_lens(key: str, cu_seq_lens: Tensor, row_starts: Tensor) -> Tensor:
    tokens = row_starts.numel()
    steps = cu_seq_lens.diff()
    if (
        len(cu_seq_lens) < 2
        or cu_seq_lens[0] != 0
        or cu_seq_lens[-1] != tokens
        or (steps < 0).any()
    ):
        raise BatchError(
            f"{key} must rise from 0 to the {tokens} tokens of the flattened batch; received "
            f"{cu_seq_lens.tolist()[:8]} ending in {cu_seq_lens.tolist()[-1:]}. "
            "Describe every token, padding included."
        )
    starts = row_starts.flatten().clone()
    starts[cu_seq_lens[:-1][steps > 0].long()] = True
    return starts.view_as(row_starts)


def _position_starts(batch: Mapping, real: Tensor) -> Tensor:
    starts = torch.zeros_like(real)
    positions = batch.get("position_ids")
    if positions is not None:
        if positions.ndim != 2:
            raise UnsupportedFeatureError(
                "StripedDataCollator takes position_ids [batch, seq]; received the shape "
                f"{tuple(positions.shape)}. Multimodal position_ids are not supported."
            )
        _check_shape("position_ids", positions, tuple(real.shape))
        starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def _check_shape(key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise BatchError(
            f"{key} must have the shape [batch, seq] of the batch, {shape}; received {tuple(tensor.shape)}. "
            "Describe every token of every row."
        )


def positions_within_documents(starts: Tensor) -> Tensor:
    """int64 `[batch, seq]`: each token's distance from the start of its document."""
    index = torch.arange(starts.shape[1]).expand(starts.shape)
    return index - torch.where(starts, index, 0).cummax(1).values


def shift_labels_within_documents(labels: Tensor, starts: Tensor, real: Tensor) -> Tensor:
    """The label each token predicts: the next token's, -100 at a document's end and on padding."""
    last = torch.ones_like(starts)
    last[:, :-1] = starts[:, 1:]
    return labels.roll(-1, 1).masked_fill(last | ~real, -100)
