"""hf-striped plan: what it says of memory is what a rank takes, and its choices are consistent."""

import ast
import ctypes
import json
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3MoeConfig,
)

from hf_striped.cli import main
from hf_striped.errors import UnsupportedFeatureError
from hf_striped.integrations.accelerate import StripedParallelismConfig
from hf_striped.integrations.collator import stripe_batch
from hf_striped.integrations.model import prepare_model
from hf_striped.models import config_of, model_of
from hf_striped.peak import peak_bytes, start_peak
from hf_striped.plan.choose import Cluster, choices, flops_of, recommended
from hf_striped.plan.counter import AttentionShape
from hf_striped.plan.memory import DDP, OFFLOAD, SETUPS, Setup, longest, memory_of
from hf_striped.plan.simulate import KEEP_ATTENTION, NOTHING, RECOMPUTE, simulate
from tests.ranks import RankPool

SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


@pytest.fixture(scope="module")
def tiny():
    return simulate(config_of("tiny"), bf16=False)


@pytest.fixture
def new_ranks():
    """Processes that hold nothing of an earlier test, which would go while memory is measured."""
    pool = RankPool()
    yield pool
    pool.close()


def peak_of_training(rank, world, seq_len, checkpointing, keep, tile):
    """Bytes that a rank takes for model, optimizer and a step, above what it had before."""
    from accelerate import Accelerator

    device = torch.device("cpu")
    allocator = ctypes.CDLL(None)
    allocator.mallopt(_MMAP_THRESHOLD, 2**16)  # what is freed goes back at once, and is not counted
    allocator.malloc_trim(0)
    config = StripedParallelismConfig(world, keep_attention=keep, loss_tile_size=tile)
    Accelerator(cpu=True, parallelism_config=config)
    start = start_peak(device)
    model = model_of("tiny", "striped_ring", torch.float32)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = DistributedDataParallel(prepare_model(model))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for length in (64 * world, seq_len):
        ids = torch.randint(4096, (1, length))
        batch, _ = stripe_batch({"input_ids": ids, "labels": ids}, world, rank)
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return peak_bytes(device) - start


@pytest.mark.parametrize(
    ("seq_len", "checkpointing", "tile"),
    [
        (3072, NOTHING, None),
        (6144, KEEP_ATTENTION, 512),
        (4096, RECOMPUTE, None),
    ],
)
def test_a_rank_takes_the_memory_that_was_planned(new_ranks, tiny, seq_len, checkpointing, tile):
    keep = checkpointing == KEEP_ATTENTION
    measured = new_ranks.run(2, peak_of_training, seq_len, checkpointing != NOTHING, keep, tile)
    planned = memory_of(tiny, Setup(DDP, checkpointing, tile), seq_len / 2, 2, bf16=False).total
    for bytes_of_rank in measured:
        assert bytes_of_rank == pytest.approx(planned, rel=0.15)


def test_products_of_matrices_are_counted_as_they_are(tiny):
    model = model_of("tiny", "striped_ring", torch.float32)
    linear = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    numbers = sum(m.weight.numel() for m in linear)
    assert tiny.layers_pass[NOTHING].flops.at(1000) == 6 * 1000 * numbers
    # 8: recomputing stops at the last tensor that is needed, before each layer's last product
    down = sum(layer.mlp.down_proj.weight.numel() for layer in model.model.layers)
    assert tiny.layers_pass[RECOMPUTE].flops.at(1000) == 1000 * (8 * numbers - 2 * down)
    assert tiny.head.flops.at(1000) == 6 * 1000 * model.lm_head.weight.numel()
    assert tiny.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("seq_len", "window"), [*product((1, 7, 20), (None, 1, 6, 50))])
def test_pairs_of_attention_are_counted(seq_len, window):
    pairs = sum(1 for q in range(seq_len) for k in range(q + 1) if window is None or q - k < window)
    assert AttentionShape(24, window).flops(seq_len) == 2 * 24 * pairs


def test_chunks_are_attended_each_by_itself():
    pairs = sum(1 for q in range(20) for k in range(q + 1) if q // 6 == k // 6)
    assert AttentionShape(24, chunk_size=6).flops(20) == 2 * 24 * pairs


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_the_longest_row_fits_and_one_token_more_does_not(tiny, setup):
    room = 2e9
    tokens = longest(tiny, setup, 4, room, bf16=False)
    assert memory_of(tiny, setup, tokens, 4, bf16=False).total <= room
    assert memory_of(tiny, setup, tokens + 1, 4, bf16=False).total > room


def test_each_way_to_save_memory_saves_memory(tiny):
    for setup in SETUPS:
        total = memory_of(tiny, setup, 10**5, 4, bf16=False).total
        shorter = memory_of(tiny, setup, 10**5 / 2, 4, bf16=False).total
        assert shorter < total
    order = [NOTHING, KEEP_ATTENTION, RECOMPUTE, OFFLOAD]
    totals = [memory_of(tiny, Setup(DDP, way, 2048), 10**5, 4, bf16=False).total for way in order]
    assert totals == sorted(totals, reverse=True)


def test_the_recommended_way_fits_and_less_is_recomputed_with_more_room(tiny):
    totals = [memory_of(tiny, setup, 2**14, 4, bf16=False).total for setup in SETUPS]
    found = []
    for room in (0.5 * min(totals), 1.01 * min(totals), 5 * max(totals)):
        every = list(choices(tiny, Cluster(4, 4, room, 1e12), 2**16, 2, bf16=False))
        assert len(every) == 3 * len(SETUPS)
        found.append(recommended(every))
        assert found[-1] is None or found[-1].memory.total <= room
        for choice in every:
            assert choice.context_parallel_size * choice.data_parallel_size == 4
            assert choice.fits == (choice.longest >= 2**16)
    assert found[0] is None
    assert found[1].setup.checkpointing == OFFLOAD
    assert found[1].context_parallel_size == 4
    assert found[2].setup.checkpointing == NOTHING
    assert found[2].context_parallel_size == 1


def test_machines_share_heads_where_they_can(tiny):
    every = choices(tiny, Cluster(16, 4, 1e12), 2**16, 2, bf16=False)
    sizes = {(c.context_parallel_size, c.heads_parallel_size) for c in every}
    assert sizes == {(1, 1), (2, 1), (4, 1), (8, 2), (16, 2)}


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(**SMALL, head_dim=16, num_attention_heads=4, num_key_value_heads=1),
        GptOssConfig(
            **SMALL, head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
        ),
        Qwen3MoeConfig(**SMALL, head_dim=16, num_attention_heads=4, num_key_value_heads=2),
        DeepseekV3Config(**SMALL, num_attention_heads=4, n_routed_experts=8, n_group=2),
        LlamaConfig(**SMALL, num_attention_heads=4, tie_word_embeddings=True),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_models_of_other_kinds_are_planned(config, bf16):
    simulation = simulate(config, bf16=bf16)
    assert simulation.layers == 2
    assert len(simulation.attention) == 2
    held = [simulation.layers_pass[way].held.a_token for way in (NOTHING, RECOMPUTE)]
    assert held[0] > held[1] > 0


def test_a_model_that_is_refused_in_training_is_refused_here():
    with pytest.raises(UnsupportedFeatureError, match="Mamba"):
        simulate(MambaConfig(hidden_size=32, num_hidden_layers=2), bf16=False)


def test_the_command_prints_a_plan_and_writes_it(tmp_path, capsys):
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    command = ["plan", "tiny", "--seq-len", "64K", "--gpus", "4", "--gpu-memory", "2GB"]
    assert main([*command, "--tflops", "1", "--json", str(plan), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(plan.read_text())
    best = written["choices"][written["recommended"]]
    assert written["seq_len"] == 65536
    assert best["fits"] and best["total"] <= 0.9 * 2e9
    assert best["total"] == pytest.approx(sum(best["memory"].values()))
    assert f"context parallel {best['context_parallel_size']} x data parallel" in printed
    arguments = next(line for line in printed.splitlines() if "TrainingArguments(" in line)
    assert ast.parse(arguments.strip())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*command[:-1], "20MB"]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_the_speed_is_that_of_a_measured_step(tmp_path, capsys, tiny):
    bench = tmp_path / "bench.json"
    step = {"model": "tiny", "seq_len": 8192, "ranks": 2, "checkpointing": False}
    bench.write_text(json.dumps({"training": [{**step, "seconds": {"striped": 4.0}}]}))
    command = ["plan", "tiny", "--gpus", "2", "--gpu-memory", "4GB", "--dtype", "fp32"]
    plan = tmp_path / "plan.json"
    options = ["--seq-len", "8192", "--bench", str(bench), "--json", str(plan)]
    assert main([*command, *options]) == 0
    setup = Setup(DDP, NOTHING, None)
    written = json.loads(plan.read_text())
    measured = flops_of(tiny, setup, 8192, 2) / 4
    assert written["cluster"]["flops"] == pytest.approx(measured)
    of_two = [c for c in written["choices"] if c["context_parallel_size"] == 2]
    assert of_two[0]["seconds"] == pytest.approx(4.0)
    bench.write_text(json.dumps({"training": []}))
    assert main([*command, *options]) == 2
    assert "must hold a training step of 'tiny'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seq-len", "1X", "must be like 4096, 128K or 1M"),
        ("--gpu-memory", "80", "must be like 80GB"),
        ("--gpus", "0", "count devices, from 1"),
        ("--reserve", "1", "a share of the memory"),
        ("--tflops", "-1", "must be positive"),
        ("--bench", "nowhere.json", "must be a file of hf-striped bench"),
        ("--bench", __file__, "must be a file of hf-striped bench"),
        ("--json", "/no/such/folder/plan.json", "no folder /no/such/folder for --json"),
        ("--plot", "/no/such/folder/plan.png", "no folder /no/such/folder for --plot"),
    ],
)
def test_a_wrong_option_is_told(capsys, option, value, message):
    options = {"--seq-len": "4096", "--gpus": "2", "--gpu-memory": "1GB"} | {option: value}
    try:
        code = main(["plan", "tiny", *(part for pair in options.items() for part in pair)])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told(capsys):
    size = ["--seq-len", "4096", "--gpus", "2", "--gpu-memory", "1GB"]
    assert main(["plan", "/no/such/folder", *size]) == 2
    assert "MODEL must be a folder" in capsys.readouterr().err
