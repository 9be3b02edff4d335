"""`hf-striped doctor`: what is well, what is wrong, and its exit code."""

import json
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from hf_striped.cli import main
from hf_striped.doctor.environment import check_kernels, check_versions
from hf_striped.doctor.parity import Step, compare, one_process_step, packed_row, supervised
from hf_striped.doctor.report import NOTE, OK, WRONG, Report
from hf_striped.kernels import KERNELS
from tests.launched import launch
from tests.models import tiny_llama
from tests.ranks import RankError


def doctor(ranks, world, folder, *options):
    found = folder / "found.json"
    options = (*options, "--seq-len", 61, "--json", found)
    printed = launch(ranks, world, "-m", "hf_striped.doctor", *options, folder=folder)
    return printed, json.loads(found.read_text())


@pytest.mark.parametrize("world", [1, 3])
def test_a_model_on_the_ring_is_found_equal_to_one_process(ranks, tmp_path, world):
    tiny_llama().save_pretrained(tmp_path / "model")
    options = tmp_path / "model", "--dtype", "float64"
    printed, result = doctor(ranks, world, tmp_path, *options)
    assert result["well"] and "verdict: all is well" in printed[0]
    assert printed[1:] == [""] * (world - 1)
    found = {finding["topic"]: finding for finding in result["findings"]}
    assert found["loss"]["status"] == found["gradient norm"]["status"] == OK
    assert found["model"]["text"].endswith("its own weights")
    assert found["kernel cpu"]["status"] == OK and found["kernel cuda"]["status"] == NOTE
    assert ("link, 16 MiB" in found) == (world > 1)
    assert sum(topic.startswith("rank ") for topic in found) == world


def break_ring_then_examine(rank, world, folder):
    """A kernel that drops a hundredth of what it computes, on the last rank alone."""
    forward = KERNELS["cpu"].forward

    def broken(*args):
        for found in forward(*args):
            yield found._replace(out=found.out * (0.99 if rank == world - 1 else 1.0))

    with patch.object(KERNELS["cpu"], "forward", broken):
        from hf_striped.doctor.command import main as examine

        return examine([str(folder / "model"), "--seq-len", "61", "--json", str(folder / "f.json")])


def test_a_ring_that_is_wrong_on_one_rank_is_found_and_every_rank_has_the_exit_code(
    ranks, tmp_path
):
    tiny_llama().save_pretrained(tmp_path / "model")
    assert ranks.run(2, break_ring_then_examine, tmp_path) == [1, 1]
    result = json.loads((tmp_path / "f.json").read_text())
    wrong = {f["topic"] for f in result["findings"] if f["status"] == WRONG}
    assert not result["well"] and "gradient norm" in wrong


def test_a_model_that_is_refused_is_wrong_with_the_reason(ranks, tmp_path):
    from transformers import MambaConfig

    MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1).save_pretrained(
        tmp_path / "model"
    )
    with pytest.raises(RankError) as failed:
        doctor(ranks, 2, tmp_path, tmp_path / "model")
    assert set(failed.value.kinds.values()) == {"SystemExit"}
    result = json.loads((tmp_path / "found.json").read_text())
    ring = next(finding for finding in result["findings"] if finding["topic"] == "ring")
    assert ring["status"] == WRONG and "Mamba" in ring["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "3"], "at least two tokens a rank"),
        (["--seq-len", "0"], "--seq-len must be 1 or more"),
        (["--context-parallel-size", "-1"], "--context-parallel-size must be 1 or more"),
        (["/no/such/folder"], "MODEL must be"),
        (["--json", "/no/such/folder/x.json"], "There is no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_is_said_before_a_process_starts(capsys, options, message):
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err


def test_it_starts_its_own_processes(capfd):
    assert main(["doctor", "--context-parallel-size", "2"]) == 0
    printed = capfd.readouterr().out
    assert "gloo, 2 rank(s)" in printed and "verdict: all is well" in printed


@pytest.mark.parametrize(
    ("ring", "status"),
    [(1.0 + 1e-7, OK), (1.0 + 1e-4, WRONG), (float("nan"), WRONG), (float("inf"), WRONG)],
)
def test_the_verdict_follows_the_tolerance(ring, status):
    report = Report()
    compare(report, Step(1.0, 1.0), Step(ring, 1.0), 1e-5, 2)
    assert [finding.status for finding in report.findings] == [status, OK]


def test_an_old_package_is_wrong_and_a_kernel_that_cannot_run_says_why():
    report = Report()
    with patch("hf_striped.doctor.environment.version", lambda name: "2.1"):
        check_versions(report, torch.device("cpu"))
    found = {finding.topic: finding for finding in report.findings}
    assert found["torch"].status == WRONG and "torch>=2.13" in found["torch"].text
    check_kernels(report, torch.device("meta"), torch.float32)
    assert report.findings[-1].topic == "kernel reference" or not report.well


def test_one_process_is_each_document_alone():
    """The doctor's own reference, against the documents run one by one."""
    row, model = packed_row(64, 40), tiny_llama("eager", torch.float64)
    found = one_process_step(model, row, torch.device("cpu"))
    starts = [*(row["position_ids"][0] == 0).nonzero().flatten().tolist(), 40]
    fresh = tiny_llama("eager", torch.float64)
    for begin, end in pairwise(starts):
        tokens = row["input_ids"][:, begin:end]
        loss = fresh(tokens, labels=tokens, num_items_in_batch=supervised(row)).loss
        loss.backward()
        found = Step(found.loss - loss.item(), found.gradient_norm)
    norm = torch.stack([p.grad.norm() for p in fresh.parameters()]).norm().item()
    assert abs(found.loss) < 1e-6 and abs(found.gradient_norm - norm) < 1e-6
    assert len(starts) > 2
