"""Mounted file systems: mounts, striping, hydration state and hydration.

Lustre is emulated (`ci.emulation.aws.lustre`): a mount table declares a folder as Lustre, and a
small ``lfs`` on PATH prints the formats of the real tool. Its restores copy files from ``file://``
URLs.
"""

import os
from pathlib import Path

import pytest

from ci.emulation.aws import lustre as emulation
from nearlinear import cli
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.loader import BlockShuffle, Loader
from nearlinear.errors import ConfigError
from nearlinear.launch.fsx import hydrate, lustre
from tests.core.data.test_loader_reads import make_dataset


@pytest.fixture
def fsx(tmp_path, monkeypatch) -> emulation.EmulatedLustre:
    """Emulate an empty file system."""
    import sys

    made = emulation.install(tmp_path / "node", sys.executable)
    monkeypatch.setenv("PATH", f"{made.tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(lustre, "MOUNT_TABLE", made.mounts)
    monkeypatch.setattr(hydrate, "POLL_INTERVAL", 0.0)
    return made


def released_folder(fsx, repository: Path, below: str = "tokens") -> Path:
    """Return a linked folder with all files of ``repository``, none of them restored."""
    for path in lustre.list_files(repository):
        name = f"{below}/{path.relative_to(repository)}"
        fsx.add_released_file(name, path.stat().st_size, path.as_uri())
    return fsx.folder / below


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Write four shards of 2 MiB."""
    folder = tmp_path_factory.mktemp("s3") / "tokens"
    make_dataset(folder, [2, 2, 2, 2], length=1024, fill=True)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


# Mounts.

LIST = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw,errors=remount-ro
36 22 0:51 / {0}/with\\040blank rw,noatime shared:1 master:2 - lustre a@tcp:/b rw,flock
37 36 0:52 / {0}/with\\040blank/inner rw - tmpfs tmpfs rw,size=1k
38 22 0:53 / {0}/wi rw - nfs4 server:/x rw
39 37 0:54 / {0}/with\\040blank/inner ro - xfs /dev/vdb rw
"""


def test_find_mount_returns_the_innermost_latest_mount(tmp_path):
    inner = tmp_path / "with blank" / "inner"
    inner.mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(LIST.format(tmp_path))
    assert lustre.find_mount(tmp_path / "with", mounts).fs_type == "ext4"  # not below "wi"
    found = lustre.find_mount(tmp_path / "with blank" / "x", mounts)
    assert found.is_lustre and found.source == "a@tcp:/b" and found.point == tmp_path / "with blank"
    assert found.options == ("rw", "noatime", "flock")
    assert lustre.find_mount(inner, mounts).fs_type == "xfs"
    assert lustre.find_mount(inner, tmp_path / "no such list") is None


def test_find_mount_reads_the_mount_table_of_this_machine(tmp_path):
    if not lustre.MOUNT_TABLE.exists():
        pytest.skip("this system has no mount table")
    found = lustre.find_mount(tmp_path)
    assert found.fs_type and found.options and os.path.ismount(found.point)


def test_mount_check_of_a_lustre_folder(fsx, tokens, capsys):
    folder = released_folder(fsx, tokens)
    assert cli.main(["fsx", "mount-check", str(folder)]) == 0
    said = capsys.readouterr().out
    source = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com@tcp:/abcdefgh"
    assert f"{folder}: Lustre, {source} on {fsx.folder}" in said
    assert "writable" in said and "options: rw, relatime, checksum, flock" in said
    assert "1 x 1 MiB" in said and "shard-" in said
    assert "0 of 10 files and 0.0 %" in said


def test_mount_check_of_another_file_system(tmp_path, capsys):
    assert cli.main(["fsx", "mount-check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not on Lustre, but on" in said and "GiB free" in said
    assert "nothing to hydrate" in said


def test_missing_folder_is_reported(tmp_path, capsys):
    for verb in ("mount-check", "hydrate", "throughput"):
        assert cli.main(["fsx", verb, str(tmp_path / "none")]) == 2
        assert "that the file system is mounted" in capsys.readouterr().err


def test_missing_lfs_is_reported(fsx, tokens, monkeypatch, capsys):
    folder = released_folder(fsx, tokens)
    monkeypatch.setattr(lustre, "has_lfs", lambda: False)
    assert cli.main(["fsx", "mount-check", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "layout: unknown, because lfs is missing" in said
    assert "lfs, which lists the files that are only in S3, is not installed" in said
    with pytest.raises(ConfigError, match="Lustre client"):
        hydrate.require_hydratable(folder)


def test_read_only_folder_is_not_writable(fsx, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lustre.tempfile, "TemporaryFile", refuse)
    assert not lustre.inspect_folder(fsx.folder).writable


def test_mount_check_advises_on_flock_and_striping(fsx, monkeypatch):
    big = fsx.folder / "big"
    with open(big, "wb") as file:
        file.truncate(2 * 2**30)
    fsx.mounts.write_text(fsx.mounts.read_text().replace(",flock", ""))
    said = "\n".join(lustre.format_folder_info(lustre.inspect_folder(fsx.folder)))
    assert "mount with -o relatime,flock" in said
    assert "lfs setstripe -c -1" in said
    monkeypatch.setattr(
        lustre, "stripe_layouts", lambda path: [lustre.StripeLayout(None, -1, 2**20)]
    )
    assert "lfs setstripe" not in "\n".join(
        lustre.format_folder_info(lustre.inspect_folder(fsx.folder))
    )


# Output formats of lfs.

PROGRESSIVE = """\
/fsx/file
  lcm_layout_gen:    4
  lcm_mirror_count:  1
  lcm_entry_count:   3
    lcme_id:             1
    lcme_mirror_id:      0
    lcme_flags:          init
    lcme_extent.e_start: 0
    lcme_extent.e_end:   104857600
      lmm_stripe_count:  1
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: 1
      lmm_objects:
      - 0: { l_ost_idx: 1, l_fid: [0x100010000:0x2:0x0] }

    lcme_id:             2
    lcme_mirror_id:      0
    lcme_flags:          0
    lcme_extent.e_start: 104857600
    lcme_extent.e_end:   10737418240
      lmm_stripe_count:  8
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: -1

    lcme_id:             3
    lcme_mirror_id:      0
    lcme_flags:          0
    lcme_extent.e_start: 10737418240
    lcme_extent.e_end:   EOF
      lmm_stripe_count:  -1
      lmm_stripe_size:   4194304
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: -1
"""
SIMPLE = """\
/fsx/file
lmm_stripe_count:  4
lmm_stripe_size:   1048576
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 3
\tobdidx\t\t objid\t\t objid\t\t group
\t     3\t             2\t          0x2\t             0
\t     2\t             2\t          0x2\t             0
"""
FOLDER = "/fsx\nstripe_count:  2 stripe_size:   4194304 pattern:       0 stripe_offset: -1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            PROGRESSIVE,
            [(104_857_600, 1, 2**20), (10_737_418_240, 8, 2**20), (None, -1, 2**22)],
        ),
        (SIMPLE, [(None, 4, 2**20)]),
        (FOLDER, [(None, 2, 2**22)]),
        ("", []),
    ],
)
def test_parse_stripe_layouts(text, expected):
    assert [(p.end, p.count, p.size) for p in lustre.parse_stripe_layouts(text)] == expected


STATES = """\
/fsx/a: (0x0000000d) released exists archived, archive_id:1
/fsx/b: (0x00000009) exists archived, archive_id:1
/fsx/c: (0x0000000b) exists dirty archived, archive_id:1
/fsx/d: (0x00000000)
/fsx/name: (0x1) with colon: (0x00000000)
/fsx/e: (0x00000001) exists, archive_id:1
"""


def test_hsm_states_parses_the_output_of_lfs(fsx):
    (fsx.tools / "lfs").write_text(f"#!/bin/sh\ncat <<'END'\n{STATES}END\n")
    found = lustre.hsm_states([Path("/fsx/a")])
    assert {path.name: state.released for path, state in found.items()} == {
        "a": True, "b": False, "c": False, "d": False, "e": False, "name: (0x1) with colon": False,
    }  # fmt: skip
    assert found[Path("/fsx/c")].archived and not found[Path("/fsx/e")].archived


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("lfs: cannot restore '/fsx/a': Operation not permitted", "run it as root"),
        ("lfs: can't get hsm state for /tmp: Inappropriate ioctl for device", "Inappropriate"),
        ("", "exit code 1"),
    ],
)
def test_lfs_errors_are_reported(fsx, error, words):
    (fsx.tools / "lfs").write_text(f'#!/bin/sh\necho "{error}" >&2\nexit 1\n')
    with pytest.raises(ConfigError, match=words):
        lustre.request_restore([Path("/fsx/a")])


# Hydration.


def test_files_are_restored_in_batches_with_progress(fsx, tokens):
    folder, said = released_folder(fsx, tokens), []
    files = lustre.list_files(folder)
    last = hydrate.restore_files(files, batch_size=4, report=said.append)
    here = [now.restored_files for now in said]
    assert here[0] == 0 and here[-1] == last.restored_files == last.num_files == len(files) == 10
    assert here == sorted(set(here)) and len(here) >= 4  # every change is reported once
    # A batch of four starts after the previous four have arrived.
    assert {4, 8} <= set(here)
    assert last.share == 1 and "all 10 files" in str(last)
    for path in files:
        assert path.read_bytes() == (tokens / path.relative_to(folder)).read_bytes()


def test_restored_files_are_not_requested_again(fsx, tokens, monkeypatch):
    folder = released_folder(fsx, tokens)
    hydrate.restore_files(lustre.list_files(folder))
    monkeypatch.setattr(lustre, "request_restore", None)
    assert hydrate.restore_files(lustre.list_files(folder)).share == 1


def test_restore_gives_up_without_progress(fsx, tokens, monkeypatch):
    folder = released_folder(fsx, tokens)
    monkeypatch.setattr(lustre, "request_restore", lambda paths: None)
    monkeypatch.setattr(hydrate, "MAX_IDLE_POLLS", 3)
    with pytest.raises(ConfigError, match="10 files do not arrive from S3. Run lfs hsm_action"):
        hydrate.restore_files(lustre.list_files(folder))


def test_shards_are_in_the_read_order_of_the_loader(tokens):
    dataset = TokenDataset(tokens, sequence_length=1024, verify="size")
    loader = Loader(dataset, 8, 1, 0, 1, seed=3, blocks=BlockShuffle(1, 2))
    wanted: list[int] = []
    for _ in range(len(dataset) // 8):
        next(loader)
        windows = loader._windows(loader._last_step, 8)
        for shard in dataset.extents(windows)[:, 0].tolist():
            if shard not in wanted:
                wanted.append(shard)
    order = hydrate.shards_by_first_use(loader.order, dataset)
    assert sorted(order) == [0, 1, 2, 3] and order != [0, 1, 2, 3]
    # Both blocks of a group are read evenly, so their first uses may be in either order.
    assert [set(order[i : i + 2]) for i in (0,)] == [set(wanted[:2])]
    names = [p.name for p in hydrate.files_in_read_order(tokens, loader.order, dataset)]
    assert names[:2] == ["index.json", "tokenizer.json"]
    assert names[2::2] == [f"shard-{shard:05d}.bin" for shard in order]
    assert names[3::2] == [f"shard-{shard:05d}.idx" for shard in order]
    plain = [p.name for p in hydrate.files_in_read_order(tokens)]
    assert plain[:2] == names[:2] and plain[2:] == sorted(plain[2:])


def test_hydrate_command_uses_the_read_order(fsx, tokens, tmp_path, capsys, monkeypatch):
    folder, asked = released_folder(fsx, tokens), []
    config = tmp_path / "run.toml"
    config.write_text("[data]\nsequence_length = 64\nshuffle_block_mib = 1\nshuffle_blocks = 2\n")
    assert cli.main(["fsx", "hydrate", str(folder), "--dry-run"]) == 0
    assert "0 of 10 files" in capsys.readouterr().out
    restore = lustre.request_restore
    monkeypatch.setattr(
        lustre, "request_restore", lambda paths: (asked.extend(paths), restore(paths))
    )
    line = ["fsx", "hydrate", str(folder), "--config", str(config), "--at-once", "2"]
    assert cli.main(line) == 0
    assert "all 10 files" in capsys.readouterr().out
    names = [path.name for path in asked]
    assert names[:2] == ["index.json", "tokenizer.json"]
    for path in lustre.list_files(tokens):
        assert (folder / path.relative_to(tokens)).read_bytes() == path.read_bytes()
    dataset = TokenDataset(folder, sequence_length=64, verify="size")
    loader = Loader(dataset, 1, blocks=BlockShuffle(1, 2))
    shards = hydrate.shards_by_first_use(loader.order, dataset)
    assert names[2::2] == [f"shard-{shard:05d}.bin" for shard in shards]
