"""The merge of partial results."""

import torch

from hf_striped.lse import merge_partial_


def attend(scores, values):
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def test_merging_blocks_in_any_order_equals_one_softmax():
    scores, values = torch.randn(5, 3, 12).double(), torch.randn(3, 12, 4).double()
    whole, whole_lse = (
        torch.einsum("qhk,hkd->qhd", scores.softmax(-1), values),
        scores.logsumexp(-1),
    )
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = torch.zeros(5, 3, 4).double(), torch.full((5, 3), -torch.inf).double()
        for index in order:
            keys = slice(4 * index, 4 * index + 4)
            part = torch.einsum("qhk,hkd->qhd", scores[..., keys].softmax(-1), values[:, keys])
            merge_partial_(out, lse, part, scores[..., keys].logsumexp(-1))
        torch.testing.assert_close(out, whole, atol=1e-12, rtol=0)
        torch.testing.assert_close(lse, whole_lse, atol=1e-12, rtol=0)


def test_a_query_that_has_seen_no_key_stays_empty_and_finite():
    out, lse = torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf)
    merge_partial_(out, lse, torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf))
    assert out.tolist() == [[[0.0, 0.0]]] and lse.item() == -torch.inf
    merge_partial_(out, lse, torch.ones(1, 1, 2), torch.full((1, 1), 3.0))
    assert out.tolist() == [[[1.0, 1.0]]] and lse.item() == 3.0
    merge_partial_(out, lse, torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf))
    assert out.tolist() == [[[1.0, 1.0]]] and lse.item() == 3.0


def test_scores_far_apart_neither_overflow_nor_vanish():
    out, lse = torch.zeros(1, 1, 1), torch.full((1, 1), -torch.inf)
    for score, value in ((-2000.0, 1.0), (2000.0, 2.0), (-2000.0, 3.0)):
        merge_partial_(out, lse, torch.full((1, 1, 1), value), torch.full((1, 1), score))
    assert out.item() == 2.0 and lse.item() == 2000.0
