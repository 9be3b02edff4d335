"""One table of tolerances by type; no test loosens its own."""

import torch

# absolute on outputs, logits and losses; relative to the largest on gradients
OUTPUT = {torch.float64: 1e-9, torch.float32: 1e-4}
GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_outputs_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=OUTPUT[expected.dtype], rtol=0)


def assert_gradients_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    largest = expected.abs().max().item()
    torch.testing.assert_close(
        actual, expected, atol=GRADIENT[expected.dtype] * max(largest, 1e-3), rtol=0
    )
