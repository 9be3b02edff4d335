"""What was found, line by line."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

OK, NOTE, WRONG = "ok", "note", "WRONG"


@dataclass
class Finding:
    """One line: what was looked at, how it is, and what was found."""

    topic: str
    status: str
    text: str


@dataclass
class Report:
    """All findings, in order."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, topic: str, status: str, text: str) -> None:
        self.findings.append(Finding(topic, status, text))

    @property
    def well(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.status != WRONG for finding in self.findings)

    def gather(self) -> None:
        """Take in what is wrong on other ranks. Every rank calls it, and has then the same verdict."""
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, self.findings)
        own = {(f.topic, f.status, f.text) for f in self.findings}
        for rank, findings in enumerate(reports):
            for found in findings:
                if found.status == WRONG and (found.topic, WRONG, found.text) not in own:
                    self.add(f"{found.topic}, rank {rank}", WRONG, found.text)
                    own.add((found.topic, WRONG, found.text))

    def text(self) -> str:
        """A table for a terminal, its verdict last."""
        width = max(len(finding.topic) for finding in self.findings)
        lines = [f"{f.topic:<{width}}  {f.status:<5}  {f.text}" for f in self.findings]
        wrong = sum(finding.status == WRONG for finding in self.findings)
        verdict = "all is well" if self.well else f"{wrong} thing(s) are wrong"
        return "\n".join([*lines, "", f"verdict: {verdict}"])

    def as_dict(self) -> dict[str, Any]:
        return {"well": self.well, "findings": [asdict(finding) for finding in self.findings]}
