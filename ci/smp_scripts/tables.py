"""Tables of the migration guide that are made from the code."""

from __future__ import annotations

import re
from pathlib import Path

from ci.environment import ROOT
from nearlinear.compat.smp.config import KEYS

PAGE = ROOT / "packages/core/docs/migration/smp_v1.md"
_TABLE = re.compile(r"(?<=<!-- keys -->\n\n).*?(?=\n\n<!-- end of keys -->)", re.DOTALL)


def key_table() -> str:
    """Return the table of configuration keys."""
    lines = ["| key | default | here |", "|:--|:--|:--|"]
    for name, key in KEYS.items():
        value = str(key.default).lower() if isinstance(key.default, bool) else key.default
        default = "-" if value is None else f"`{value}`"
        effect = key.becomes
        if key.unused:
            effect = f"accepted, no effect: {key.unused}"
        elif key.required is not None:
            effect = f"must be `{str(key.required).lower()}`: {key.reason}"
        lines.append(f"| `{name}` | {default} | {effect} |")
    return "\n".join(lines)


def page_table() -> str:
    """Return the table in the migration guide."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    return "" if found is None else found[0]


def write() -> Path:
    """Update the migration guide and return its path."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: key_table(), text), encoding="utf-8")
    return PAGE
