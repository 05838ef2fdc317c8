"""Findings of the doctor, and the report that prints them as text or JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

OK, SLOW, OFF, BROKEN = "ok", "slow", "off", "broken"
STATE_MEANINGS = {
    OK: "works at full speed",
    SLOW: "works, and could be faster",
    OFF: "not available here, or provided by another library",
    BROKEN: "the CPU backend does not work until this is repaired",
}
WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    state: str
    """Severity: OK, SLOW, OFF or BROKEN."""
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        head = f"{self.state:<7} {self.name:<15} "
        indent = " " * len(head)
        lines = [_wrap(head + self.message, indent)]
        if self.remedy:
            lines.append(_wrap(f"{indent}-> {self.remedy}", indent + "   "))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        # "says" is the key in the JSON format, which programs read.
        return {
            "name": self.name,
            "state": self.state,
            "says": self.message,
            "remedy": self.remedy,
        }


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


@dataclass(frozen=True, repr=False)
class Report:
    """Findings of one machine. Prints as text, also in a notebook."""

    title: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """True if the CPU backend can be used."""
        return all(finding.state != BROKEN for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def to_json(self) -> str:
        findings = [finding.to_dict() for finding in self.findings]
        return json.dumps(
            {"title": self.title, "works": self.works, "findings": findings}, indent=2
        )

    def __str__(self) -> str:
        states = {finding.state for finding in self.findings}
        legend = [
            f"{state:<7} {meaning}" for state, meaning in STATE_MEANINGS.items() if state in states
        ]
        return "\n".join([self.title, "", *map(str, self.findings), "", *legend])

    __repr__ = __str__
