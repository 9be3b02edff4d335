"""Heads x ring: exact for packed rows, for every division of the ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_striped import stripe, striped_ring_attention, unstripe
from tests.models import tiny_llama, token_rows
from tests.ranks import RankError
from tests.test_ring_attention import (
    SHAPES,
    SINKS,
    assert_gradients_equal,
    assert_outputs_equal,
    inputs,
    one_process,
)
from tests.test_trainer_life import one_process as train_in_one_process
from tests.training import assert_same_run, train


def shared(rank, world, size, name, options):
    """The operator on one rank of `size` heads x `world / size` in the ring."""
    ring_size = world // size
    rings = [dist.new_group(range(u * ring_size, (u + 1) * ring_size)) for u in range(size)]
    heads = [dist.new_group(range(i, world, ring_size)) for i in range(ring_size)]
    *tensors, cu_seqlens = inputs(name, world)
    *leaves, dout = (stripe(t, 2, world, rank).clone() for t in tensors)
    leaves = [t.requires_grad_() for t in leaves]
    options = {"scale": 0.3, "cu_seqlens": cu_seqlens, "return_lse": True, **options}
    if options.get("sinks") is not None:
        leaves.append(options["sinks"].clone().requires_grad_())
        options["sinks"] = leaves[-1]
    group, heads_group = rings[rank // ring_size], heads[rank % ring_size]
    out, lse = striped_ring_attention(*leaves[:3], group, heads_group=heads_group, **options)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["dense", "packed", "one token a rank"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3, "sinks": SINKS}], ids=["plain", "window and sinks"]
)
def test_shared_heads_equal_one_process(ranks, world, size, name, options):
    heads = SHAPES[name][1]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = options["sinks"][:heads]
    *tensors, cu_seqlens = inputs(name, world)
    out, lse, gradients = one_process(*tensors, cu_seqlens, 0.3, **options)
    found = list(zip(*ranks.run(world, shared, size, name, options), strict=True))
    assert_outputs_equal(unstripe(found[0], 2), out)
    assert_outputs_equal(unstripe(found[1], 2), lse)
    for actual, expected in zip(found[2:5], gradients[:3], strict=True):
        assert_gradients_equal(unstripe(actual, 2), expected)
    if "sinks" in options:
        assert_gradients_equal(sum(found[5]), gradients[3])


@pytest.mark.parametrize(("world", "cp_size", "size"), [(2, 2, 2), (4, 4, 2), (4, 4, 4), (4, 2, 2)])
def test_a_trainer_with_shared_heads_equals_one_process(ranks, world, cp_size, size):
    """Two key heads: four ranks hold each of them twice."""
    rows = token_rows(6, 13)
    reference = train_in_one_process(rows, batch_size=world // cp_size)
    run = partial(train, config={"heads_parallel_size": size})
    for result in ranks.run(world, run, rows, cp_size):
        assert_same_run(result, reference)


@pytest.mark.parametrize(
    ("cp_size", "size", "model", "message"),
    [
        (4, 3, tiny_llama, "must divide context_parallel_size; received 3 and 4"),
        (
            4,
            4,
            partial(tiny_llama, hidden_size=24, num_attention_heads=6, num_key_value_heads=3),
            "6 query heads are not a multiple of 4",
        ),
        (2, 0, tiny_llama, "heads_parallel_size must be a positive integer"),
    ],
)
def test_ranks_that_cannot_share_heads_are_refused(ranks, cp_size, size, model, message):
    run = partial(train, model=model, config={"heads_parallel_size": size})
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(cp_size, run, token_rows(4, 8), cp_size)
    assert caught.value.kinds == dict.fromkeys(range(cp_size), "ConfigurationError")


def chosen_by_default(rank, world, local_world_size):
    import os

    from accelerate import Accelerator

    from hf_striped import StripedParallelismConfig, prepare_model
    from hf_striped.integrations.active import active_context

    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    prepare_model(tiny_llama())
    group = active_context().heads_group
    return 1 if group is None else dist.get_world_size(group)


@pytest.mark.parametrize(("local_world_size", "size"), [(4, 1), (2, 2), (1, 2)])
def test_by_default_machines_share_heads(ranks, local_world_size, size):
    """Two key heads: at most two machines share them."""
    assert ranks.run(4, chosen_by_default, local_world_size) == [size] * 4
