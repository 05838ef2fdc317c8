"""Findings, and the report that holds them: for people as text, for programs as JSON."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

OK, SLOW, OFF, BROKEN = "ok", "slow", "off", "broken"
MEANING = {
    OK: "as it should be",
    SLOW: "works, and could be faster",
    OFF: "not here, or done by another library",
    BROKEN: "the CPU backend does not work until this is mended",
}
WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One thing that was tried: its state, what was found, and what to do about it."""

    name: str
    state: str
    says: str
    remedy: str = ""

    def __str__(self) -> str:
        head = f"{self.state:<7} {self.name:<15} "
        hang = " " * len(head)
        lines = [filled(head + self.says, hang)]
        if self.remedy:
            lines.append(filled(f"{hang}-> {self.remedy}", hang + "   "))
        return "\n".join(lines)


def filled(text: str, hang: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=hang, break_on_hyphens=False)


@dataclass(frozen=True, repr=False)
class Report:
    title: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether the CPU backend can be used at all."""
        return all(finding.state != BROKEN for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def to_json(self) -> str:
        findings = [asdict(finding) for finding in self.findings]
        return json.dumps(
            {"title": self.title, "works": self.works, "findings": findings}, indent=2
        )

    def __str__(self) -> str:
        states = {finding.state for finding in self.findings}
        legend = [f"{state:<7} {MEANING[state]}" for state in MEANING if state in states]
        return "\n".join([self.title, "", *map(str, self.findings), "", *legend])

    __repr__ = __str__  # what a notebook shows


def examine() -> Report:
    import torch

    from nearlinear_collectives.version import __version__

    title = (
        f"nearlinear_collectives {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()} "
        f"{platform.machine()}"
    )
    return Report(title, tuple(findings()))


def findings() -> Iterator[Finding]:
    from nearlinear_collectives.doctor import machine, nccl, network, software

    yield from software.findings()
    yield from machine.findings()
    yield from network.findings()
    yield from nccl.findings()
