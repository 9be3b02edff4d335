"""What striped attention does not compute is refused by name, on every rank, before any exchange."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    Lfm2MoeConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MistralConfig,
)

from hf_striped import (
    ConfigurationError,
    StripedDataCollator,
    StripedParallelismConfig,
    UnsupportedFeatureError,
    prepare_model,
)
from hf_striped.integrations.transformers import striped_ring_attention_forward
from tests.documents import dense, random_documents
from tests.model_zoo import shrink
from tests.models import VOCABULARY, tiny_llama, tiny_model, token_rows
from tests.ranks import RankError
from tests.striped_model import already_batched, assert_equal_to_one_process
from tests.tolerances import assert_outputs_equal


def call(module=None, mask=None, **arguments):
    """One attention call on a striped batch of one rank."""
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    module = module or SimpleNamespace(is_causal=True, training=True)
    arguments = {"striped_cu_seqlens": torch.tensor([0, 4]), **arguments}
    return striped_ring_attention_forward(module, *tensors, mask, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, r"attention dropout in training .*received 0\.1"),
        ({"position_bias": torch.zeros(1, 2, 4, 4)}, "position_bias; received a tensor"),
        ({"is_causal": False}, "non-causal attention"),
        ({"module": SimpleNamespace(is_causal=False, training=True)}, "non-causal attention"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, "a custom attention_mask; received a tensor"),
        ({"output_attentions": True}, "output_attentions; received True"),
        ({"head_mask": torch.zeros(2)}, r"the attention argument\(s\) head_mask"),
        ({"cu_seq_lens_q": torch.zeros(2)}, r"the attention argument\(s\) cu_seq_lens_q"),
        (
            {"module": SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))},
            "encoder-decoder models",
        ),
    ],
)
def test_an_argument_of_attention_is_used_or_refused_by_name(arguments, message):  # C19 C21
    with pytest.raises(UnsupportedFeatureError, match=message):
        call(**arguments)


def test_arguments_that_change_nothing_in_attention_are_let_through():
    out, weights = call(position_ids=torch.zeros(1, 4), use_cache=False, num_items_in_batch=3)
    assert out.shape == (1, 4, 2, 8) and weights is None
    call(head_mask=None, sliding_window=None, softcap=None)


def one_step(rank, world, build_model, rows, inputs=None, striped=True):
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    model = build_model("striped_ring").train()
    collator = (
        StripedDataCollator()
        if striped
        else lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    )
    batch = collator(rows)
    model(**batch, **(inputs or {})).logits.sum().backward()


MASK = {"attention_mask": torch.zeros(1, 1, 4, 4)}


@pytest.mark.parametrize(
    ("build_model", "inputs", "striped", "message"),
    [
        (partial(tiny_llama, attention_dropout=0.1), {}, True, "attention dropout in training"),
        (tiny_llama, {"output_attentions": True}, True, "output_attentions"),
        (tiny_llama, MASK, True, "custom attention_mask"),
        (tiny_llama, {"attention_mask": torch.ones(1, 4)}, True, "carries no attention_mask"),
        (
            tiny_llama,
            {},
            False,
            r"no 'striped_cu_seqlens'.*StripedDataCollator\(your_collator\)",
        ),
    ],
)
def test_a_model_that_needs_what_is_not_supported_is_refused_on_every_rank(  # C19 C21
    ranks, build_model, inputs, striped, message
):
    with pytest.raises(RankError, match=f"(?s){message}") as caught:
        ranks.run(2, one_step, build_model, token_rows(1, 8), inputs, striped)
    assert set(caught.value.kinds) == {0, 1}
    assert set(caught.value.kinds.values()) <= {"UnsupportedFeatureError", "ConfigurationError"}


def evaluate_with_dropout(rank, world, rows):
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    model = tiny_llama("striped_ring", attention_dropout=0.1).eval()
    with torch.no_grad():
        return model(**StripedDataCollator()(rows)).logits


def test_attention_dropout_is_nothing_in_evaluation(ranks):  # C19
    rows = token_rows(1, 8)
    plain = tiny_llama("sdpa").eval()(input_ids=torch.tensor([rows[0]["input_ids"]])).logits
    shards = ranks.run(2, evaluate_with_dropout, rows)
    for rank, logits in enumerate(shards):
        assert_outputs_equal(logits, plain[:, rank::2].detach())


ORDINARY = {  # model, what it is compared with
    "llama": (tiny_llama, "sdpa"),
    "a window": (partial(tiny_model, shrink(MistralConfig)), "sdpa"),
    "a softcap": (partial(tiny_model, shrink(Gemma2Config)), "eager"),
    "sinks": (partial(tiny_model, shrink(GptOssConfig)), "eager"),
}


def ordinary_passes(rank, world, tokens, name):
    """An ordinary forward pass, a padded one and generation, while a group is active."""
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    results = []
    build_model, plain = ORDINARY[name]
    for implementation in ("striped_ring", plain):
        model = build_model(implementation).eval()
        mask = torch.ones_like(tokens)
        mask[0, :3] = 0
        with torch.no_grad():
            results.append(
                (
                    model(input_ids=tokens).logits,
                    model(input_ids=tokens, attention_mask=mask).logits,
                    model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0),
                    model.generate(
                        tokens,
                        attention_mask=mask,
                        max_new_tokens=4,
                        do_sample=False,
                        pad_token_id=0,
                        cache_implementation="static",
                    ),
                )
            )
    for striped, plain in zip(*results, strict=True):
        torch.testing.assert_close(striped, plain)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ORDINARY)
def test_without_stripes_the_attention_is_ordinary(ranks, name, world):
    tokens = torch.tensor([row["input_ids"] for row in token_rows(2, 9)])
    ranks.run(world, ordinary_passes, tokens, name)


def test_a_model_that_stripes_would_get_wrong_is_named_before_training():
    model = tiny_model(shrink(Lfm2MoeConfig), "striped_ring")
    with pytest.raises(UnsupportedFeatureError, match=r"Conv1d \(model\.layers\.0\.conv"):
        prepare_model(model)
    config = tiny_llama().config
    for head in (LlamaForSequenceClassification, LlamaForTokenClassification):
        with pytest.raises(UnsupportedFeatureError, match=f"received {head.__name__}, whose loss"):
            prepare_model(head(config))
    with pytest.raises(UnsupportedFeatureError, match="attention of its own"):
        prepare_model(tiny_model(shrink(BloomConfig), "eager"))


def test_a_striped_batch_without_its_group_is_refused():
    batch = StripedDataCollator(cp_size=2, cp_rank=0)(token_rows(1, 8))
    with pytest.raises(ConfigurationError, match=r"4 tokens here of 8 in all \(striped over 2\)"):
        tiny_llama("striped_ring")(**batch)


@pytest.mark.parametrize("mask", [None, "all ones", "padding on the left"])
def test_a_later_token_changes_no_earlier_logits(ranks, mask):  # C12
    documents = random_documents([9, 9])
    changed = [document.clone() for document in documents]
    for document in changed:
        document[-1] = (document[-1] + 1) % VOCABULARY

    def layout(documents):
        batch, places = dense(documents)
        if mask is not None:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if mask == "padding on the left":
            batch["attention_mask"][0, :4] = 0
        return batch, places

    logits = []
    for tokens in (documents, changed):
        shards = ranks.run(2, logits_of, layout(tokens)[0])
        logits.append(torch.stack(shards, 2).flatten(1, 2)[:, :9])
    assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.equal(logits[0][:, -1], logits[1][:, -1])


def logits_of(rank, world, batch):
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    with torch.no_grad():
        striped = StripedDataCollator(already_batched)([batch])
        return tiny_llama("striped_ring")(**striped).logits


def test_the_ring_is_what_a_striped_batch_runs_through(ranks):
    """Guards the tests above: with the ring the dense batch equals one process."""
    assert_equal_to_one_process(ranks, 2, tiny_llama, random_documents([8]), dense)
