"""What StripedTelemetry logs and traces."""

import json
from functools import partial

import pytest
import torch
from transformers import TrainerCallback

from hf_striped import ConfigurationError, StripedTelemetry
from hf_striped.meter import ATTENTION, WAITING, Meter, count_sent, measured
from tests.models import token_rows
from tests.training import train

NAMES = {
    "tokens_per_second_per_device",
    "attention_seconds",
    "waiting_seconds",
    "sent_gib",
    "peak_memory_gib",
}


class Report(TrainerCallback):
    """As TensorBoard's: it stands before the user's callbacks, and takes each log as it is handed to it."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))

    def on_train_end(self, args, state, control, **kwargs):
        self.history = state.log_history


def train_with_telemetry(rank, world, rows, cp_size, folder=None, config=None, **arguments):
    report = Report()
    callbacks = [report, StripedTelemetry(folder)]
    train(rank, world, rows, cp_size, callbacks=callbacks, config=config, **arguments)
    logs = [log for log in report.logs if "loss" in log]
    assert [{**log, "epoch": 0, "step": 0} for log in report.history if "loss" in log] == [
        {**log, "epoch": 0, "step": 0} for log in logs
    ]
    return logs


@pytest.mark.parametrize(
    ("world", "config", "sends"),
    [
        # a layer sends keys and values once forward and backward, and their gradients; tiny_llama has
        # 2 layers, 2 key heads of 8
        (2, {"exchange": "ring"}, 2 * 3 * 16 * 2 * 2 * 8),
        (2, {"exchange": "gather"}, 2 * 3 * 16 * 2 * 2 * 8),
        (1, {}, 0),
    ],
)
def test_each_log_has_the_ring_in_it_and_reports_see_it(ranks, world, config, sends):
    rows = token_rows(6, 32)
    for logs in ranks.run(world, partial(train_with_telemetry, config=config), rows, world):
        assert len(logs) == 3
        for log in logs:
            assert log.keys() >= NAMES
            assert log["sent_gib"] == sends * 4 / 2**30
            assert 0 <= log["waiting_seconds"] <= log["attention_seconds"]
            assert log["attention_seconds"] > 0 and log["tokens_per_second_per_device"] > 0
            assert log["peak_memory_gib"] > 0.05


def test_all_ranks_log_the_same_figures_over_several_steps(ranks):
    found = ranks.run(
        2, partial(train_with_telemetry, logging_steps=2, max_steps=4), token_rows(6, 32), 2
    )
    assert [len(logs) for logs in found] == [2, 2]
    for mine, other in zip(*found, strict=True):
        assert {name: mine[name] for name in NAMES} == {name: other[name] for name in NAMES}


def test_a_trace_names_the_steps_of_the_ring(ranks, tmp_path):
    ranks.run(2, train_with_telemetry, token_rows(6, 32), 2, str(tmp_path))
    for rank in range(2):
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event.get("name") for event in events]
        for key_rank, step in ((rank, 1), (1 - rank, 2)):
            # steps 2 and 3 of the run, 2 layers, forward and backward
            assert names.count(f"ring step {step} of 2: keys of rank {key_rank}") == 2 * 2 * 2
        assert "ring wait" in names and "ring attention backward" in names


@pytest.mark.parametrize("steps", [(0, 2), (3, 2)])
def test_steps_that_are_no_range_are_refused(steps):
    with pytest.raises(ConfigurationError, match="trace_steps must be the first and the last"):
        StripedTelemetry("traces", steps)


def test_a_meter_counts_only_while_it_is_entered_and_each_kind_for_itself():
    meter, tensor = Meter(), torch.zeros(3, dtype=torch.float64)
    count_sent(tensor)
    with meter:
        count_sent(tensor, 2)
        with measured("a", tensor.device, ATTENTION), measured("b", tensor.device, WAITING):
            torch.zeros(1000).sum()
    with measured("c", tensor.device, "other"):
        pass
    assert meter.sent == 2 * 3 * 8
    assert 0 < meter.seconds(WAITING) <= meter.seconds(ATTENTION)
    assert meter.seconds("other") == 0
    meter.reset()
    assert meter.sent == 0 and meter.seconds(ATTENTION) == 0
