"""From a natural-order batch to this rank's stripe of it.

Every rank of the group collates the same whole batch and keeps its own tokens, so labels are shifted
before striping and an unusable batch raises the same error on every rank, before any exchange.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from hf_striped.errors import BatchError, ConfigurationError, UnsupportedFeatureError
from hf_striped.integrations.active import active_context
from hf_striped.integrations.documents import (
    DOCUMENT_KEYS,
    document_starts,
    positions_within_documents,
    real_tokens,
    shift_labels_within_documents,
)
from hf_striped.integrations.transformers import CU_SEQLENS_KEY
from hf_striped.packing import cu_seqlens_from_starts
from hf_striped.striping import check_cp_size_and_rank, stripe

NATURAL_KEY = "striped_natural_rows"
CHECKSUM_KEY = "striped_checksum"


class StripedDataCollator:
    """Wrap a collator so that each rank receives its stripe of the batch.

    Args:
        base_collator: any collator that returns a mapping of tensors in natural token order; a
            tokenizer (pads and labels as `DataCollatorForLanguageModeling(mlm=False)`); or None for
            features that already are tensors or lists of equal length.
        cp_size: number of ranks a sequence is striped over; default from the Accelerate state, else 1.
        cp_rank: this process's rank in the group; default from the Accelerate state. Given with `cp_size`.
        pad_token_id: the token that fills a row up to a multiple of `cp_size`; default the
            tokenizer's, else 0. It counts nowhere: a document of its own, without labels.

    Attributes:
        keeps_attention_mask: a call also returns `attention_mask` `[batch, local_seq]`, 0 on padding, for
            a Trainer that counts real tokens; it is taken out again before the model.
        keeps_checksum: a call also returns a checksum of the whole batch, which the ranks compare.
        keeps_natural_rows: a call also returns the base collator's rows in `striped_natural_rows`;
            `StripedTrainer` sets it for evaluation.

    Raises:
        ConfigurationError: one of `cp_size` and `cp_rank` without the other, not `0 <= cp_rank < cp_size`, a
            tokenizer without a pad token, or a `base_collator` that cannot be called.

    Example:
        >>> import hf_striped
        >>> collator = hf_striped.StripedDataCollator(cp_size=2, cp_rank=1)
        >>> batch = collator([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}])
        >>> batch["input_ids"].tolist(), batch["shift_labels"].tolist()
        ([[6, 8]], [[7, -100]])
    """

    def __init__(
        self,
        base_collator: Callable | PreTrainedTokenizerBase | None = None,
        *,
        cp_size: int | None = None,
        cp_rank: int | None = None,
        pad_token_id: int | None = None,
    ):
        if (cp_size is None) != (cp_rank is None):
            raise ConfigurationError(
                f"Give cp_size and cp_rank together, or neither; received cp_size={cp_size}, "
                f"cp_rank={cp_rank}. Without them they come from the Accelerate state."
            )
        if cp_size is not None:
            check_cp_size_and_rank(cp_size, cp_rank)
        tokenizer = base_collator
        if isinstance(base_collator, PreTrainedTokenizerBase):
            if base_collator.pad_token is None:
                raise ConfigurationError(
                    f"A tokenizer given as the collator must have a pad token; {type(base_collator).__name__} "
                    "has none. Set tokenizer.pad_token = tokenizer.eos_token, or another token."
                )
            base_collator = DataCollatorForLanguageModeling(base_collator, mlm=False)
        elif base_collator is not None and not callable(base_collator):
            raise ConfigurationError(
                "base_collator must be a collator, a tokenizer or None; received "
                f"{type(base_collator).__name__}."
            )
        else:
            tokenizer = getattr(base_collator, "tokenizer", None)
        if pad_token_id is None:
            pad_token_id = getattr(tokenizer, "pad_token_id", None)
        self.base_collator = base_collator if base_collator is not None else stack_features
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self.keeps_natural_rows = False
        self.keeps_attention_mask = False
        self.keeps_checksum = False
        self._size_and_rank = None if cp_size is None else (cp_size, cp_rank)

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Collate `features`, shift their labels within documents, and keep this rank's tokens.

        Args:
            features: what the base collator takes, the same on all ranks of the group.

        Returns:
            `input_ids`, `position_ids` within documents, `labels` and `shift_labels`, each `[batch, local_seq]`;
            both labels are equal, -100 at each document's end and on padding. `striped_cu_seqlens`, int32
            `[documents + 1]`, global. Other keys with one value a token are striped too; scalars, one value a
            row and values that are not tensors pass through.

        Raises:
            BatchError: no tokens, shapes that do not fit together, or keys that name different documents.
            UnsupportedFeatureError: a mask that is not `[batch, seq]` of 0 and 1, `position_ids` that are not
                `[batch, seq]`, padding inside a document, or a key that is none of the above.
            ConfigurationError: a batch that is striped already, or what `size_and_rank` raises.
        """
        batch = self.base_collator(features)
        striped, real = stripe_batch(batch, *self.size_and_rank(), self.pad_token_id)
        if self.keeps_attention_mask:
            striped["attention_mask"] = real.long()
        if self.keeps_natural_rows:
            striped[NATURAL_KEY] = dict(batch)
        if self.keeps_checksum:
            striped[CHECKSUM_KEY] = checksum(batch)
        return striped

    def size_and_rank(self) -> tuple[int, int]:
        """Those that were given, else those of the active group.

        Returns:
            The group's size and this process's rank in it; (1, 0) without a group.

        Raises:
            ConfigurationError: those given are not the active group's, or Accelerate splits sequences itself.
        """
        cp = active_context()
        if self._size_and_rank is None:
            return (cp.size, cp.rank) if cp is not None else (1, 0)
        if cp is not None and (cp.size, cp.rank) != self._size_and_rank:
            raise ConfigurationError(
                "StripedDataCollator was given (cp_size, cp_rank) = "
                f"{self._size_and_rank}, and the active group has {(cp.size, cp.rank)}. "
                "Leave both out: they come from the Accelerate state."
            )
        return self._size_and_rank

    def __getstate__(self) -> dict[str, Any]:
        """A spawned data-loading worker has no process group: it gets size and rank resolved."""
        return {**vars(self), "_size_and_rank": self.size_and_rank()}


def stack_features(features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The default collator: stack features of equal keys and lengths.

    Raises:
        BatchError: features of different keys or lengths.
    """
    keys = {tuple(sorted(feature)) for feature in features}
    if len(keys) != 1:
        raise BatchError(
            f"All features of a batch must have the same keys; received {sorted(keys)}."
        )
    batch = {}
    for key in features[0]:
        values = [torch.as_tensor(feature[key]) for feature in features]
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) != 1:
            raise BatchError(
                f"Without a base collator all features must have the same length; {key!r} has {shapes}. "
                "Pass a collator that pads or packs, or the tokenizer, as base_collator."
            )
        batch[key] = torch.stack(values)
    return batch


def stripe_batch(
    batch: Mapping[str, Any], cp_size: int, cp_rank: int, pad_token_id: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """This rank's stripe of a natural-order batch as `StripedDataCollator` says, and where its tokens are real."""
    batch = {key: value for key, value in batch.items() if value is not None}
    shape = _batch_shape(batch)
    missing = -shape[1] % cp_size
    real = real_tokens(batch, shape)
    starts = document_starts(batch, real)
    if missing:
        starts = pad(starts, (0, missing))
        starts[:, shape[1]] = real[:, -1]  # a run of padding of its own, or the last one's end
        real = pad(real, (0, missing))
    fills = {"input_ids": pad_token_id, "labels": -100, "shift_labels": -100}
    row = {
        key: pad(value, (0, 0) * (value.ndim - 2) + (0, missing), value=fills.get(key, 0))
        for key, value in batch.items()
        if _is_per_token(key, value, shape)
    }
    if "position_ids" not in row:
        row["position_ids"] = positions_within_documents(starts)
    if "shift_labels" not in row and "labels" in row:
        row["shift_labels"] = shift_labels_within_documents(row["labels"], starts, real)
    if "shift_labels" in row:
        row["labels"] = row["shift_labels"]
    striped = {key: stripe(value, 1, cp_size, cp_rank).contiguous() for key, value in row.items()}
    passed = {k: v for k, v in batch.items() if k not in row and k not in DOCUMENT_KEYS}
    striped = {**striped, **passed, CU_SEQLENS_KEY: cu_seqlens_from_starts(starts)}
    return striped, stripe(real, 1, cp_size, cp_rank)


def checksum(batch: Mapping[str, Any]) -> Tensor:
    """int64 `[2]`: what tells one natural-order batch from another."""
    digest = sha256()
    for key in sorted(batch):
        value = batch[key]
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()[:16]), dtype=torch.int64)


def _batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    if CU_SEQLENS_KEY in batch:
        raise ConfigurationError(
            f"The base collator's batch is striped already (it has {CU_SEQLENS_KEY!r}). "
            "Wrap the collator once."
        )
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        found = {k: tuple(v.shape) if isinstance(v, Tensor) else type(v) for k, v in batch.items()}
        raise BatchError(
            "A batch needs input_ids [batch, seq] or inputs_embeds [batch, seq, hidden] as tensors; received "
            f"{found}. Let the base collator return PyTorch tensors."
        )
    return tokens.shape[0], tokens.shape[1]


def _is_per_token(key: str, value: Any, shape: tuple[int, int]) -> bool:
    if key in DOCUMENT_KEYS or not isinstance(value, Tensor):
        return False
    if value.ndim >= 2 and tuple(value.shape[:2]) == shape:
        return True
    if value.ndim == 0 or tuple(value.shape) == shape[:1]:
        return False
    raise UnsupportedFeatureError(
        f"StripedDataCollator cannot tell how to stripe {key!r} of shape {tuple(value.shape)} in a batch of "
        f"shape {shape}. Give it one value a token, one a row, or remove it in the base collator."
    )
