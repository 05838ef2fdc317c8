"""A folder that stands for a mounted Lustre file system linked to S3, and its tool ``lfs``.

Files that are only in S3 are holes of the right size; ``lfs hsm_restore`` fetches their bytes over
HTTP. As with the real one a restore is asked for first and done later: here, a few files at each
look. The kernel sees an ordinary folder, so a list of mounts that names it as Lustre comes along.
"""

import fcntl
import json
import stat
import sys
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

AT_A_LOOK = 3  # restores that are done whenever somebody looks


@dataclass(frozen=True)
class Emulated:
    """Where its parts are."""

    folder: Path
    """that stands for the mount"""
    tools: Path
    """folder with ``lfs``, for PATH"""
    mounts: Path
    """the kernel's list of mounts as it would be"""
    state: Path
    """what is only in S3, and what was asked for"""

    def appear(self, path: str, size: int, url: str) -> None:
        """A file whose bytes are only in S3."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as hole:
            hole.truncate(size)
        with _changing(self.state) as state:
            state["released"][str(file)] = url


def install(folder: Path, python: str) -> Emulated:
    """Make the mount, its tool and its state below ``folder``."""
    folder = folder.resolve()
    made = Emulated(folder / "fsx", folder / "bin", folder / "mountinfo", folder / "lustre.json")
    for each in (made.folder, made.tools):
        each.mkdir(parents=True, exist_ok=True)
    made.state.write_text(json.dumps({"released": {}, "asked": []}))
    source = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com@tcp:/abcdefgh"
    made.mounts.write_text(
        "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
        f"36 22 0:51 / {str(made.folder).replace(' ', chr(92) + '040')} rw,relatime shared:1 - "
        f"lustre {source} rw,checksum,flock,nouser_xattr,lruresize,lazystatfs\n"
    )
    lfs = made.tools / "lfs"
    lfs.write_text(
        f'#!/bin/sh\nexec "{python}" -E -s "{Path(__file__).resolve()}" "{made.state}" "$@"\n'
    )
    lfs.chmod(lfs.stat().st_mode | stat.S_IXUSR)
    return made


@contextmanager
def _changing(path: Path):
    """The state, locked, and written back."""
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


def main(state_path: str, verb: str, *arguments: str) -> int:
    """``lfs VERB FILE...`` of this folder."""
    with _changing(Path(state_path)) as state:
        if verb == "hsm_state":
            _work(state)
            for name in arguments:
                if name in state["released"]:
                    print(f"{name}: (0x0000000d) released exists archived, archive_id:1")
                else:
                    print(f"{name}: (0x00000009) exists archived, archive_id:1")
        elif verb == "hsm_restore":
            state["asked"] += [name for name in arguments if name in state["released"]]
        elif verb == "getstripe":
            name = arguments[-1]
            print(name)
            print("lmm_stripe_count:  1\nlmm_stripe_size:   1048576\nlmm_pattern:       raid0")
            print("lmm_layout_gen:    0\nlmm_stripe_offset: 0")
            print("\tobdidx\t\t objid\t\t objid\t\t group\n\t     0\t      98\t 0x62\t     0\n")
        else:
            print(f"lfs: {verb} is not emulated", file=sys.stderr)
            return 1
    return 0


def _work(state: dict) -> None:
    """A few of the restores that were asked for."""
    done, state["asked"] = state["asked"][:AT_A_LOOK], state["asked"][AT_A_LOOK:]
    for name in done:
        url = state["released"].pop(name, None)
        if url:
            with urllib.request.urlopen(url) as answer, open(name, "r+b") as file:
                file.write(answer.read())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
