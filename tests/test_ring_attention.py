"""The ring against one process, in fp64: out, dq, dk, dv, and how the ranks talk."""

import gc
import random
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import hf_striped.ring
from hf_striped import (
    BatchError,
    ConfigurationError,
    stripe,
    striped_ring_attention,
    unstripe,
)
from tests.ranks import RankError
from tests.tolerances import assert_gradients_equal, assert_outputs_equal

SHAPES = {  # batch, heads, key_heads, local_seq, head_dim, value_head_dim, cuts of the row
    "dense": (1, 4, 2, 6, 64, 64, None),
    "batch of rows": (3, 4, 4, 5, 8, 8, None),
    "wide heads, one key head": (1, 4, 1, 7, 128, 128, None),
    "one token a rank": (1, 2, 2, 1, 8, 8, None),
    "packed": (2, 6, 2, 12, 8, 8, [1, 1, 5, 6, 13]),
    "value head_dim of its own": (1, 2, 1, 6, 8, 4, [3]),
}


def inputs(name, cp_size):
    batch, heads, key_heads, local, head_dim, value_head_dim, cuts = SHAPES[name]
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    seq = local * cp_size
    tensors = (
        normal(batch, heads, seq, head_dim),
        normal(batch, key_heads, seq, head_dim),
        normal(batch, key_heads, seq, value_head_dim),
        normal(batch, heads, seq, value_head_dim),
    )
    if cuts is None:
        return *tensors, None
    return *tensors, torch.tensor([0, *[min(c, batch * seq) for c in cuts], batch * seq])


def one_process(
    query, key, value, dout, cu_seqlens, scale, sliding_window=None, softcap=None, sinks=None
):
    """Dense masked softmax over the flattened row, by autograd."""
    batch, heads, seq, _ = query.shape
    tokens = torch.arange(batch * seq)
    bounds = torch.arange(batch + 1) * seq if cu_seqlens is None else cu_seqlens
    document = torch.bucketize(tokens, bounds[1:], right=True)
    allowed = (document[:, None] == document) & (tokens[:, None] >= tokens)
    if sliding_window is not None:
        allowed &= tokens[:, None] - tokens < sliding_window
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    rows = [t.transpose(1, 2).flatten(0, 1).transpose(0, 1) for t in leaves]
    rows = [rows[0], *(r.repeat_interleave(heads // len(r), 0) for r in rows[1:])]
    scores = rows[0] @ rows[1].mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())
        column = leaves[-1][:, None, None].expand(-1, len(tokens), 1)
        scores = torch.cat([scores, column], -1)
        rows[2] = torch.cat([rows[2], torch.zeros_like(rows[2][:, :1])], 1)
    out = (scores.softmax(-1) @ rows[2]).transpose(0, 1).unflatten(0, (batch, seq)).transpose(1, 2)
    lse = scores.logsumexp(-1).unflatten(1, (batch, seq)).transpose(0, 1)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout)


def ring(rank, world, name, kernel, options=None):
    *tensors, cu_seqlens = inputs(name, world)
    query, key, value, dout = (stripe(t, 2, world, rank).clone() for t in tensors)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    group = dist.group.WORLD if world > 1 else None
    given = {"scale": 0.3, "cu_seqlens": cu_seqlens, "kernel": kernel}
    options = {**given, **(options or {})}
    if options.get("sinks") is not None:
        leaves.append(options["sinks"].clone().requires_grad_())
        options["sinks"] = leaves[-1]
    out, lse = striped_ring_attention(*leaves[:3], group, return_lse=True, **options)
    once = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    twice = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    return out.detach(), lse, *once


@pytest.mark.parametrize(
    ("kernel", "exchange"), [("cpu", "ring"), ("reference", "ring"), ("cpu", "gather")]
)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradients_equal_one_process_and_again_on_a_second_backward(  # C07 C20
    ranks, name, cp_size, kernel, exchange
):
    *tensors, cu_seqlens = inputs(name, cp_size)
    out, lse, gradients = one_process(*tensors, cu_seqlens, 0.3)
    results = ranks.run(cp_size, ring, name, kernel, {"exchange": exchange})
    found = [unstripe(shards, 2) for shards in zip(*results, strict=True)]
    assert_outputs_equal(found[0], out)
    assert_outputs_equal(found[1], lse)
    for actual, expected in zip(found[2:], gradients, strict=True):
        assert_gradients_equal(actual, expected)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0], dtype=torch.float64)
RULES = {
    "window of the query alone": {"sliding_window": 1},
    "window smaller than the ring": {"sliding_window": 2},
    "window": {"sliding_window": 5},
    "window beyond the sequence": {"sliding_window": 1000},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": SINKS},
    "softcap and sinks in a window": {"sliding_window": 3, "softcap": 0.7, "sinks": SINKS},
}


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["dense", "packed", "one token a rank"])
@pytest.mark.parametrize("rule", RULES)
def test_windows_softcap_and_sinks_equal_one_process(ranks, rule, name, cp_size):
    *tensors, cu_seqlens = inputs(name, cp_size)
    options = dict(RULES[rule])
    if "sinks" in options:
        options["sinks"] = options["sinks"][: SHAPES[name][1]]
    out, lse, gradients = one_process(*tensors, cu_seqlens, 0.3, **options)
    exchange = "gather" if cp_size == 3 else "ring"
    results = ranks.run(cp_size, ring, name, "auto", {**options, "exchange": exchange})
    found = list(zip(*results, strict=True))
    assert_outputs_equal(unstripe(found[0], 2), out)
    assert_outputs_equal(unstripe(found[1], 2), lse)
    for actual, expected in zip(found[2:5], gradients[:3], strict=True):
        assert_gradients_equal(unstripe(actual, 2), expected)
    if "sinks" in options:  # each rank has its own tokens' share
        assert_gradients_equal(sum(found[5]), gradients[3])


def default_scale(rank, world):
    query, key, value, _, _ = inputs("dense", 1)
    return striped_ring_attention(query, key, value, None)


def test_the_default_scale_is_one_over_the_root_of_head_dim(ranks):
    *tensors, _ = inputs("dense", 1)
    assert_outputs_equal(ranks.run(1, default_scale)[0], one_process(*tensors, None, 64**-0.5)[0])


def layers_with_sleeps(rank, world, steps, layers):
    *tensors, _ = inputs("dense", world)
    query, key, value, _ = (stripe(t, 2, world, rank).clone() for t in tensors)
    nap = random.Random(rank)
    results = []
    for _ in range(steps):
        leaf = query.clone().requires_grad_()
        hidden = leaf
        for _ in range(layers):
            time.sleep(nap.random() / 500)
            hidden = striped_ring_attention(hidden, key, value, dist.group.WORLD, exchange="ring")
        hidden.sum().backward()
        results.append((hidden.detach(), leaf.grad))
    assert all(
        torch.equal(out, results[0][0]) and torch.equal(gradient, results[0][1])
        for out, gradient in results
    )
    return results[0]


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_a_hundred_steps_of_four_layers_never_hang_when_ranks_are_late(ranks, cp_size):  # C22
    results = ranks.run(cp_size, layers_with_sleeps, 100, 4)
    query, key, value, _, _ = inputs("dense", cp_size)
    leaf = query.clone().requires_grad_()
    hidden = leaf
    for _ in range(4):
        repeated = (t.repeat_interleave(2, 1) for t in (key, value))
        hidden = torch.nn.functional.scaled_dot_product_attention(hidden, *repeated, is_causal=True)
    hidden.sum().backward()
    outs, gradients = zip(*results, strict=True)
    assert_outputs_equal(unstripe(outs, 2), hidden.detach())
    assert_gradients_equal(unstripe(gradients, 2), leaf.grad)


def two_groups_at_once(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    *tensors, cu_seqlens = inputs("packed", 2)
    query, key, value, _ = (stripe(t + rank // 2, 2, 2, rank % 2) for t in tensors)
    return striped_ring_attention(query, key, value, group, scale=0.3, cu_seqlens=cu_seqlens)


def test_two_groups_ring_at_once_each_in_its_own_order(ranks):  # C23
    results = ranks.run(4, two_groups_at_once)
    *tensors, cu_seqlens = inputs("packed", 2)
    for index in range(2):
        out, _, _ = one_process(*(t + index for t in tensors), cu_seqlens, 0.3)
        assert_outputs_equal(unstripe(results[2 * index : 2 * index + 2], 2), out)


def other_group(rank, world):
    group = dist.new_group([0, 1])
    tensors = [torch.zeros(1, 1, 2, 4)] * 3
    if rank < 2:
        return striped_ring_attention(*tensors, group)
    with pytest.raises(ConfigurationError, match="global rank 2 is not a member"):
        striped_ring_attention(*tensors, group)


def test_a_process_outside_the_group_is_refused(ranks):
    ranks.run(3, other_group)


def traffic(rank, world, sliding_window=None):
    """The largest number of remote K/V buffers alive at once, and what a forward pass sends."""
    received_blocks, most, sent = [], [0], []
    start = hf_striped.ring.start_shift

    def counted(cp, tensor, received=None):
        shift = start(cp, tensor, received)
        received_blocks.append(weakref.ref(shift._tensors[1]))
        sent.append(tensor.numel())
        gc.collect()
        alive = {id(block()) for block in received_blocks if block() is not None}
        most[0] = max(most[0], len(alive))
        return shift

    hf_striped.ring.start_shift = counted
    try:
        *tensors, _ = inputs("dense", world)
        query, key, value, _ = (stripe(t, 2, world, rank) for t in tensors)
        striped_ring_attention(query, key, value, dist.group.WORLD, sliding_window=sliding_window)
    finally:
        hf_striped.ring.start_shift = start
    return most[0], sent, key.numel() + value.numel()


def test_at_most_two_remote_blocks_are_alive_and_grouped_heads_travel_unexpanded(ranks):  # C20
    for most, sent, own in ranks.run(4, traffic):
        assert most == 2
        assert sent == [own] * 3


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (2, 1), (3, 2), (4, 3), (100, 3)])
def test_keys_travel_no_further_than_the_last_rank_whose_window_reaches_them(ranks, window, hops):
    for _, sent, own in ranks.run(4, traffic, window):
        assert sent == [own] * hops


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": 0}, BatchError, "at least 1; received 0"),
        ({"softcap": 0.0}, BatchError, r"positive; received 0\.0"),
        ({"sinks": torch.zeros(3)}, BatchError, r"\[query_heads\] = \[2\]; received \(3,\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, BatchError, r"= 4\); received \[0, 3\]"),
        ({"key": torch.zeros(1, 2, 3, 8)}, BatchError, "same batch and local_seq"),
        ({"key": torch.zeros(1, 2, 4, 6)}, BatchError, "same head_dim"),
        ({"query": torch.zeros(1, 3, 4, 8)}, BatchError, "multiple of key_heads"),
        ({"query": torch.zeros(4, 8)}, BatchError, r"\[batch, heads, local_seq, head_dim\]"),
        ({"value": torch.zeros(1, 2, 4, 8).double()}, BatchError, "share one type"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_the_values(change, error, message):
    arguments = {name: torch.zeros(1, 2, 4, 8) for name in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        striped_ring_attention(**{**arguments, "group": None, **change})


def bad_on_every_rank(rank, world):
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    striped_ring_attention(*tensors, dist.group.WORLD, cu_seqlens=torch.tensor([0, 4]))


def test_bad_input_raises_on_every_rank_before_any_exchange(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(2, bad_on_every_rank)
    assert caught.value.kinds == {0: "BatchError", 1: "BatchError"}


def test_the_operators_pass_torchs_own_checks():
    query, key, value = (t[:, :, :6].double() for t in inputs("dense", 1)[:3])
    rows = [
        t.transpose(1, 2).flatten(0, 1).contiguous().requires_grad_() for t in (query, key, value)
    ]
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    for sinks in (None, SINKS[:4].clone().requires_grad_()):
        arguments = (*rows, sinks, bounds, "", "reference", "ring", 0.3, 4, None, 2.0)
        torch.library.opcheck(torch.ops.hf_striped.ring_attention.default, arguments)


def saved_bytes(rank, world):
    """What one attention layer keeps for the backward pass on one rank."""
    *tensors, _ = inputs("dense", 4)
    query, key, value, _ = (stripe(t, 2, world, rank).clone().requires_grad_() for t in tensors)
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        striped_ring_attention(query, key, value, dist.group.WORLD if world > 1 else None)
    return sum(saved.values())


def test_what_a_layer_keeps_falls_as_one_over_the_group(ranks):
    (alone,) = ranks.run(1, saved_bytes)
    assert all(kept <= 0.3 * alone for kept in ranks.run(4, saved_bytes))
