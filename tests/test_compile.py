"""torch_compile: the ring is one opaque operator, and no layer is broken by it."""

from functools import partial

import pytest
from accelerate import Accelerator

from hf_striped import StripedDataCollator, StripedParallelismConfig, prepare_model
from tests.models import tiny_llama, tiny_model, token_rows
from tests.training import assert_same_run, train


def explain_breaks(rank, world, windowed):
    """Where the graph of a whole model is broken, by the functions on the way there."""
    import torch._dynamo
    from transformers import MistralConfig

    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = MistralConfig(**size, num_hidden_layers=2, intermediate_size=64, sliding_window=3)
    model = prepare_model(tiny_model(config) if windowed else tiny_llama())
    batch = StripedDataCollator()(token_rows(2, 12))
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(**batch)
    operators = [str(op) for ops in explained.ops_per_graph for op in ops]
    stacks = [[frame.name for frame in r.user_stack] for r in explained.break_reasons]
    return operators.count("hf_striped.ring_attention.default"), stacks


@pytest.mark.parametrize("windowed", [False, True])
def test_no_graph_is_broken_inside_a_layer(ranks, windowed):
    for rings, stacks in ranks.run(2, explain_breaks, windowed):
        assert rings == 2  # one operator a layer
        assert all("striped_ring_attention_forward" not in stack for stack in stacks), stacks
        assert all(stack[-1] == "striped_ring_mask" for stack in stacks if len(stack) > 1), stacks


def test_a_compiled_model_trains_to_the_numbers_of_one_process(ranks):
    rows = token_rows(6, 9)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    reference = train(0, 1, rows, 1, striped=False)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)
