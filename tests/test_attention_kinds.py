"""Every kind of attention and RoPE of the Llama family, through whole models, at cp 2, 3 and 4."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from transformers import Llama4TextConfig, LlamaConfig, Qwen2Config

from hf_striped import (
    ConfigurationError,
    StripedDataCollator,
    StripedParallelismConfig,
    prepare_model,
    stripe,
    striped_ring_attention,
    unstripe,
)
from tests.documents import dense, packed_by_positions, padded_left, random_documents
from tests.model_zoo import shrink, tiny_config
from tests.models import VOCABULARY, tiny_model
from tests.ranks import RankError
from tests.striped_model import already_batched, assert_equal_to_one_process

FAMILY = [
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "cohere2",
    "smollm3",
]
LENGTHS = [9, 4, 17]


def build(model_type, attn_implementation, dtype=torch.float32):
    # sdpa has neither softcap nor sinks: one process uses eager attention
    plain = "eager" if attn_implementation == "sdpa" else attn_implementation
    return tiny_model(tiny_config(model_type), plain, dtype)


@pytest.mark.parametrize("layout", [packed_by_positions, padded_left])
@pytest.mark.parametrize("cp_size", [3, 4])
@pytest.mark.parametrize("model_type", FAMILY)
def test_windows_chunks_softcap_sinks_and_latent_attention_equal_one_process(
    ranks, model_type, cp_size, layout
):
    documents = random_documents(LENGTHS)
    assert_equal_to_one_process(ranks, cp_size, partial(build, model_type), documents, layout)


def qwen2_with_window(attn_implementation):
    config = shrink(Qwen2Config)
    config = Qwen2Config(
        **{
            **config.to_dict(),
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "layer_types": None,
        }
    )
    assert config.layer_types == ["full_attention", "sliding_attention"]
    return tiny_model(config, attn_implementation)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_a_window_in_some_layers_only_equals_one_process(ranks, cp_size):
    documents = random_documents(LENGTHS)
    assert_equal_to_one_process(ranks, cp_size, qwen2_with_window, documents, packed_by_positions)


def llama4_with_temperature(attn_implementation):
    config = shrink(Llama4TextConfig).to_dict() | {
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "floor_scale": 4,
        "attn_scale": 0.5,
    }
    return tiny_model(Llama4TextConfig(**config), attn_implementation)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_llama_4s_temperature_follows_the_whole_sequence(ranks, cp_size):
    documents = random_documents([21, 21])
    assert_equal_to_one_process(ranks, cp_size, llama4_with_temperature, documents, dense)


SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 3.0, 4.0, 5.0]
ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 16,
                 "short_factor": SHORT, "long_factor": LONG},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 16,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip
BATCHES = [[12], [40, 7], [12], [17, 3], [64], [8, 8]]  # growing and shrinking, packed


def llama_with_rope(kind, attn_implementation):
    config = LlamaConfig(
        **{
            **shrink(LlamaConfig).to_dict(),
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **ROPE[kind]},
        }
    )
    return tiny_model(config, attn_implementation)


def logits_of_batches(rank, world, kind, prepared=True):
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    model = llama_with_rope(kind, "striped_ring")
    if prepared:
        prepare_model(model)
    results = []
    for seed, lengths in enumerate(BATCHES):
        batch = packed_by_positions(random_documents(lengths, seed)).batch
        striped = StripedDataCollator(already_batched)([batch])
        with torch.no_grad():
            results.append(model(**striped).logits)
    return results


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ROPE)
def test_rope_chooses_the_frequencies_of_one_process_from_batch_to_batch(ranks, kind, cp_size):
    plain = llama_with_rope(kind, "sdpa")
    shards = ranks.run(cp_size, logits_of_batches, kind)
    for seed, lengths in enumerate(BATCHES):
        batch = packed_by_positions(random_documents(lengths, seed)).batch
        with torch.no_grad():
            expected = plain(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits
        found = unstripe([shard[seed] for shard in shards], 1)[:, : sum(lengths)]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_length_is_refused_unprepared(ranks, kind):
    with pytest.raises(RankError, match=r"Call hf_striped\.prepare_model") as caught:
        ranks.run(2, logits_of_batches, kind, False)
    assert caught.value.kinds == dict.fromkeys(range(2), ConfigurationError.__name__)


def ring_in(rank, world, dtype, scale):
    generator = torch.Generator().manual_seed(5)
    shape = 1, 4, 192, 64
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    import torch.distributed as dist

    query, key, value, dout = (stripe(t, 2, world, rank).to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    group = dist.group.WORLD if world > 1 else None
    out = striped_ring_attention(*leaves, group, scale=scale)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def sdpa_in(dtype, scale):
    generator = torch.Generator().manual_seed(5)
    shape = 1, 4, 192, 64
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    leaves = [t.to(dtype).requires_grad_() for t in tensors[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
    return out.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_sdpa_at_any_ring_size(ranks, dtype):  # C17
    exact = sdpa_in(torch.float64, 0.125)
    plain = [(a.double() - b).norm() for a, b in zip(sdpa_in(dtype, 0.125), exact, strict=True)]
    for cp_size in (1, 2, 4):
        shards = zip(*ranks.run(cp_size, ring_in, dtype, 0.125), strict=True)
        for index, parts in enumerate(shards):
            error = (unstripe(parts, 2).double() - exact[index]).norm()
            assert error <= 2 * plain[index], (cp_size, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_hundreds_stay_finite(ranks, dtype):  # C17
    for parts in zip(*ranks.run(4, ring_in, dtype, 10.0), strict=True):
        assert all(part.isfinite().all() for part in parts)


def logits_of(rank, world, model_type, batch):
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    model = build(model_type, "striped_ring").eval()
    with torch.no_grad():
        return model(**StripedDataCollator(already_batched)([batch])).logits


def seen_by(ranks, model_type, layout, documents, changed):
    """Which tokens' logits move when one token changes, in the natural order of the batch."""
    logits = []
    for variant in (documents, changed):
        shards = ranks.run(3, logits_of, model_type, layout(variant).batch)
        logits.append(unstripe(shards, 1))
    return (logits[0] != logits[1]).any(-1)


@pytest.mark.parametrize("layout", [packed_by_positions, padded_left])
@pytest.mark.parametrize(("model_type", "reach"), [("llama", 100), ("mistral", 1 + 2 * (5 - 1))])
def test_a_changed_token_moves_the_logits_in_its_reach_and_no_others(
    ranks, model_type, reach, layout
):
    documents = random_documents([7, 19, 6])
    changed = [document.clone() for document in documents]
    changed[1][4] = (changed[1][4] + 1) % VOCABULARY
    moved = seen_by(ranks, model_type, layout, documents, changed)
    _, places = layout(documents)
    expected = torch.zeros_like(moved)
    row, column = places[1]
    # two layers of window 5: each lets a token reach 4 further
    expected[row, column + 4 : column + min(19, 4 + reach)] = True
    assert torch.equal(moved, expected)
