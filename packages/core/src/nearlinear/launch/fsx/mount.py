"""What a folder is on, seen from the machine that has it: the mount, its options, space, layout.

Asks nothing of AWS. A folder on another file system is described as far as it goes.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from . import lfs

MOUNTS = Path("/proc/self/mountinfo")
LUSTRE = "lustre"
MANY = 2**30  # bytes from which a file gains from several storage targets


@dataclass(frozen=True)
class Mount:
    """One line of the kernel's list."""

    point: Path
    kind: str
    """file system type: lustre, ext4, ..."""
    source: str
    """what is mounted; of FSx DNS_NAME@tcp:/MOUNT_NAME"""
    options: tuple[str, ...]
    """of the mount and of the file system"""

    @property
    def lustre(self) -> bool:
        return self.kind == LUSTRE


@dataclass(frozen=True)
class Looked:
    """A folder, looked at."""

    folder: Path
    mount: Mount | None
    """None where the kernel does not list its mounts"""
    writable: bool
    free: int
    """bytes"""
    size: int
    """bytes"""
    stripes: tuple[lfs.Stripes, ...] | None
    """layout of the largest file in it, or of the folder; None where it cannot be told"""
    striped_file: Path | None
    """the file that `stripes` is of"""


def of(folder: Path, mounts: Path | None = None) -> Mount | None:
    """The mount that ``folder`` is on: the innermost of those above it."""
    mounts = mounts or MOUNTS
    if not mounts.exists():
        return None
    folder, best = folder.resolve(), None
    for found in map(_parsed, mounts.read_text().splitlines()):
        inside = folder == found.point or found.point in folder.parents
        if inside and (best is None or len(found.point.parts) >= len(best.point.parts)):
            best = found  # of two at one place the later hides the earlier
    return best


def look(folder: Path, mounts: Path | None = None) -> Looked:
    """Everything about ``folder``. Raises ConfigError where it is no folder."""
    require(folder)
    mount, space = of(folder, mounts), os.statvfs(folder)
    stripes = largest = None
    if mount and mount.lustre and lfs.there():
        largest = max(files(folder), key=lambda path: path.stat().st_size, default=None)
        stripes = tuple(lfs.stripes(largest or folder))
    return Looked(
        folder=folder,
        mount=mount,
        writable=_writable(folder),
        free=space.f_bavail * space.f_frsize,
        size=space.f_blocks * space.f_frsize,
        stripes=stripes,
        striped_file=largest,
    )


def require(folder: Path) -> None:
    """Raise ConfigError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; is the file system mounted? findmnt says")


def files(folder: Path) -> list[Path]:
    """All regular files below, in order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def report(found: Looked) -> list[str]:
    """Lines for a person: what it is, and what could be better."""
    lines = [_what(found)]
    access = "can be written" if found.writable else "read only for this user"
    lines.append(f"{access}, {found.free / 2**30:,.0f} of {found.size / 2**30:,.0f} GiB free")
    if found.mount:
        lines.append(f"options: {', '.join(found.mount.options)}")
    if found.mount and found.mount.lustre:
        lines += _advice(found)
    return lines


def _what(found: Looked) -> str:
    if found.mount is None:
        return f"{found.folder}: this system does not list its mounts"
    mount = found.mount
    if mount.lustre:
        return f"{found.folder}: Lustre, {mount.source} on {mount.point}"
    return (
        f"{found.folder}: not on Lustre but on {mount.kind} ({mount.point}); what follows is true "
        "of that"
    )


def _advice(found: Looked) -> list[str]:
    lines = []
    if not {"flock", "localflock"} & set(found.mount.options):
        lines.append("no flock: programs that lock files fail; mount with -o relatime,flock")
    if found.stripes is None:
        lines.append("layout: lfs is not on this machine; it comes with the Lustre client")
        return lines
    lines.append(f"layout of {found.striped_file or found.folder}: {_layout(found.stripes)}")
    size = found.striped_file.stat().st_size if found.striped_file else 0
    widest = max((abs(part.count) if part.count > 0 else 2 for part in found.stripes), default=1)
    if size >= MANY and widest == 1:
        lines.append(
            "a file of more than 1 GiB on one storage target is as fast as that one: lfs setstripe "
            "-c -1 FOLDER before files are made or imported there"
        )
    return lines


def _layout(stripes: tuple[lfs.Stripes, ...]) -> str:
    parts = []
    for part in stripes:
        over = "all targets" if part.count < 0 else f"{part.count} x"
        upto = f" up to {part.end / 2**20:,.0f} MiB" if part.end else ""
        parts.append(f"{over} {part.size / 2**20:g} MiB{upto}")
    return ", then ".join(parts)


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _parsed(line: str) -> Mount:
    """A line of mountinfo: ids, root, mount point, options, tags, "-", type, source, options."""
    first, _, last = line.partition(" - ")
    words, (kind, source, more) = first.split(), (last.split() + ["", ""])[:3]
    options = dict.fromkeys([*words[5].split(","), *more.split(",")])
    return Mount(Path(_plain(words[4])), kind, _plain(source), tuple(filter(None, options)))


def _plain(text: str) -> str:
    """Without the octal escapes for blanks."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
