"""A folder that stands for a mounted FSx for Lustre file system linked to S3, and its ``lfs``.

Files whose bytes are only in S3 are sparse files of the right size; ``lfs hsm_restore`` fetches the
bytes over HTTP. A restore is asynchronous, as in the real tool: every ``lfs hsm_state`` completes a
few pending restores. Since the kernel sees an ordinary folder, `install` also writes a mount table
that lists the folder as Lustre.
"""

import fcntl
import json
import stat
import sys
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RESTORES_PER_QUERY = 3  # pending restores completed by each `lfs hsm_state`


@dataclass(frozen=True)
class EmulatedLustre:
    """Paths of an emulated mount."""

    folder: Path
    """Folder that stands for the mount."""
    tools: Path
    """Folder with ``lfs``, for PATH."""
    mounts: Path
    """Mount table in the format of /proc/self/mountinfo."""
    state: Path
    """JSON file with the released files and the pending restores."""

    def add_released_file(self, path: str, size: int, url: str) -> None:
        """Add a file of ``size`` bytes whose contents are only at ``url``."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as hole:
            hole.truncate(size)
        with _locked_state(self.state) as state:
            state["released"][str(file)] = url


def install(folder: Path, python: str) -> EmulatedLustre:
    """Create the mount, ``lfs`` (run by the interpreter ``python``) and the state in ``folder``."""
    folder = folder.resolve()
    made = EmulatedLustre(
        folder / "fsx", folder / "bin", folder / "mountinfo", folder / "lustre.json"
    )
    for each in (made.folder, made.tools):
        each.mkdir(parents=True, exist_ok=True)
    made.state.write_text(json.dumps({"released": {}, "pending": []}))
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
def _locked_state(path: Path):
    """Yield the state under a file lock and write it back."""
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


def main(state_path: str, verb: str, *arguments: str) -> int:
    """Emulate ``lfs VERB FILE...``."""
    with _locked_state(Path(state_path)) as state:
        if verb == "hsm_state":
            _complete_restores(state)
            for name in arguments:
                if name in state["released"]:
                    print(f"{name}: (0x0000000d) released exists archived, archive_id:1")
                else:
                    print(f"{name}: (0x00000009) exists archived, archive_id:1")
        elif verb == "hsm_restore":
            state["pending"] += [name for name in arguments if name in state["released"]]
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


def _complete_restores(state: dict) -> None:
    """Complete the first pending restores."""
    pending = state["pending"]
    done, state["pending"] = pending[:RESTORES_PER_QUERY], pending[RESTORES_PER_QUERY:]
    for name in done:
        url = state["released"].pop(name, None)
        if url:
            with urllib.request.urlopen(url) as response, open(name, "r+b") as file:
                file.write(response.read())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
