"""Lustre client of this machine: mounts, and the tool ``lfs``.

Nothing here contacts AWS. ``lfs`` reports the files that are only in S3, restores them, and reports
how files are striped. Its output formats are those of Lustre 2.10 to 2.15. The name and size of a
"released" file are in the file system, and its data is only in S3. Source: the chapters on HSM and
on file layout of Lustre's manual.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

MOUNT_TABLE = Path("/proc/self/mountinfo")
_LUSTRE = "lustre"
_STRIPED_SIZE = 2**30  # bytes above which a file gains from several storage targets

_FILES_PER_CALL = 500  # limits the length of the command line
_STATE = re.compile(r"^(?P<path>.*): \((?P<bits>0x[0-9a-f]+)\)(?P<words>[^,\n]*)", re.MULTILINE)
_ARCHIVED, _RELEASED = 0x8, 0x4


@dataclass(frozen=True)
class HsmState:
    """Location of a file's data (hierarchical storage management)."""

    released: bool
    """The data is only in S3."""
    archived: bool
    """The data is in S3, and unless released also in the file system."""


@dataclass(frozen=True)
class StripeLayout:
    """Striping of one extent of a file over storage targets."""

    end: int | None
    """First byte after the extent; None: the end of the file."""
    count: int
    """Number of storage targets; -1: all."""
    size: int
    """Consecutive bytes on one target."""


@dataclass(frozen=True)
class Mount:
    """One entry of the kernel's mount table."""

    point: Path
    fs_type: str
    """File system type: lustre, ext4, ..."""
    source: str
    """Mounted device; for FSx, DNS_NAME@tcp:/MOUNT_NAME."""
    options: tuple[str, ...]
    """Options of the mount and of the file system."""

    @property
    def is_lustre(self) -> bool:
        return self.fs_type == _LUSTRE


@dataclass(frozen=True)
class FolderInfo:
    """Mount, space and striping of a folder."""

    folder: Path
    mount: Mount | None
    """None if the kernel has no mount table."""
    writable: bool
    free: int
    """Bytes."""
    size: int
    """Bytes."""
    stripes: tuple[StripeLayout, ...] | None
    """Layout of the largest file in the folder, or of the folder; None without ``lfs``."""
    striped_file: Path | None
    """File whose layout ``stripes`` is."""


def find_mount(folder: Path, mount_table: Path | None = None) -> Mount | None:
    """Return the innermost mount that contains ``folder``."""
    mount_table = mount_table or MOUNT_TABLE
    if not mount_table.exists():
        return None
    folder, best = folder.resolve(), None
    for mount in map(_parse_mount, mount_table.read_text().splitlines()):
        inside = folder == mount.point or mount.point in folder.parents
        if inside and (best is None or len(mount.point.parts) >= len(best.point.parts)):
            best = mount  # a later mount at the same point hides the earlier one
    return best


def inspect_folder(folder: Path, mount_table: Path | None = None) -> FolderInfo:
    """Return mount, space and striping of ``folder``. Raises ConfigError if it does not exist."""
    require_folder(folder)
    mount, space = find_mount(folder, mount_table), os.statvfs(folder)
    stripes = largest = None
    if mount and mount.is_lustre and has_lfs():
        largest = max(list_files(folder), key=lambda path: path.stat().st_size, default=None)
        stripes = tuple(stripe_layouts(largest or folder))
    return FolderInfo(
        folder=folder,
        mount=mount,
        writable=_is_writable(folder),
        free=space.f_bavail * space.f_frsize,
        size=space.f_blocks * space.f_frsize,
        stripes=stripes,
        striped_file=largest,
    )


def require_folder(folder: Path) -> None:
    """Raise ConfigError if ``folder`` does not exist."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; check with findmnt that the file system is mounted"
        )


def list_files(folder: Path) -> list[Path]:
    """Return all regular files below ``folder``, sorted by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def format_folder_info(info: FolderInfo) -> list[str]:
    """Format the properties of a folder, with advice, one item per line."""
    lines = [_describe_mount(info)]
    access = "writable" if info.writable else "read-only for this user"
    lines.append(f"{access}, {info.free / 2**30:,.0f} of {info.size / 2**30:,.0f} GiB free")
    if info.mount:
        lines.append(f"options: {', '.join(info.mount.options)}")
    if info.mount and info.mount.is_lustre:
        lines += _lustre_advice(info, info.mount)
    return lines


def _describe_mount(info: FolderInfo) -> str:
    if info.mount is None:
        return f"{info.folder}: this system has no mount table"
    mount = info.mount
    if mount.is_lustre:
        return f"{info.folder}: Lustre, {mount.source} on {mount.point}"
    return f"{info.folder}: not on Lustre, but on {mount.fs_type} ({mount.point})"


def _lustre_advice(info: FolderInfo, mount: Mount) -> list[str]:
    lines = []
    if not {"flock", "localflock"} & set(mount.options):
        lines.append("no flock: programs that lock files fail; mount with -o relatime,flock")
    if info.stripes is None:
        lines.append("layout: unknown, because lfs is missing; install the Lustre client")
        return lines
    lines.append(f"layout of {info.striped_file or info.folder}: {_format_stripes(info.stripes)}")
    size = info.striped_file.stat().st_size if info.striped_file else 0
    widest = max((each.count if each.count > 0 else 2 for each in info.stripes), default=1)
    if size >= _STRIPED_SIZE and widest == 1:
        lines.append(
            "a file of more than 1 GiB on one storage target is limited to the speed of that "
            "target: run lfs setstripe -c -1 FOLDER before files are created or imported there"
        )
    return lines


def _format_stripes(stripes: tuple[StripeLayout, ...]) -> str:
    parts = []
    for each in stripes:
        targets = "all targets" if each.count < 0 else f"{each.count} x"
        end = f" up to {each.end / 2**20:,.0f} MiB" if each.end else ""
        parts.append(f"{targets} {each.size / 2**20:g} MiB{end}")
    return ", then ".join(parts)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _parse_mount(line: str) -> Mount:
    """Parse a line of mountinfo: IDs, root, point, options, tags, "-", type, source, options."""
    first, _, last = line.partition(" - ")
    words, (fs_type, source, more) = first.split(), (last.split() + ["", ""])[:3]
    options = dict.fromkeys([*words[5].split(","), *more.split(",")])
    point = Path(_decode_octal(words[4]))
    return Mount(point, fs_type, _decode_octal(source), tuple(filter(None, options)))


def _decode_octal(text: str) -> str:
    """Decode the octal escapes of white space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def has_lfs() -> bool:
    """Return True if ``lfs`` is installed on this machine."""
    return shutil.which("lfs") is not None


def hsm_states(paths: Iterable[Path]) -> dict[Path, HsmState]:
    """Return the states of files on Lustre. Raises ConfigError if ``lfs`` fails."""
    found: dict[Path, HsmState] = {}
    for batch in split_into_batches(list(paths)):
        for path, bits in parse_hsm_states(_run_lfs("hsm_state", batch)).items():
            found[Path(path)] = HsmState(bool(bits & _RELEASED), bool(bits & _ARCHIVED))
    return found


def parse_hsm_states(text: str) -> dict[str, int]:
    """Parse the output of ``lfs hsm_state`` to state bits by file."""
    return {found["path"]: int(found["bits"], 16) for found in _STATE.finditer(text)}


def request_restore(paths: Sequence[Path]) -> None:
    """Request a restore of files from S3, without waiting. Raises ConfigError if ``lfs`` fails."""
    for batch in split_into_batches(paths):
        _run_lfs("hsm_restore", batch)


def stripe_layouts(path: Path) -> list[StripeLayout]:
    """Return the layout of a file or a folder, by extent."""
    arguments = ["-d", path] if path.is_dir() else [path]
    return parse_stripe_layouts(_run_lfs("getstripe", arguments))


def parse_stripe_layouts(text: str) -> list[StripeLayout]:
    """Parse the output of ``lfs getstripe``: one extent, or those of a progressive layout."""
    found, end, count = [], None, None
    for name, value in re.findall(
        r"(lcme_extent\.e_end|(?:lmm_)?stripe_count|(?:lmm_)?stripe_size):\s+(-?\w+)", text
    ):
        if name == "lcme_extent.e_end":
            end = None if value == "EOF" else int(value)
        elif name.endswith("stripe_count"):
            count = int(value)
        elif count is not None:
            found.append(StripeLayout(end, count, int(value)))
            count = None
    return found


def split_into_batches(
    paths: Sequence[Path], size: int = _FILES_PER_CALL
) -> Iterable[Sequence[Path]]:
    """Yield consecutive slices of at most ``size`` paths."""
    return (paths[start : start + size] for start in range(0, len(paths), size))


def _run_lfs(verb: str, arguments: Sequence[str | Path]) -> str:
    done = subprocess.run(
        ["lfs", verb, *map(str, arguments)], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        denied = "Operation not permitted" in lines[-1] or "Permission denied" in lines[-1]
        remedy = "; run it as root" if denied else ""
        raise ConfigError(f"lfs {verb}: {lines[-1]}{remedy}")
    return done.stdout
