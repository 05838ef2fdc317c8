"""A mounted file system, looked at from this machine: the mount, its layout, what is only in S3.

No Lustre is here: a list of mounts calls a folder Lustre, and a small ``lfs`` on PATH answers with
the real one's formats (`ci.aws.lustre`). Its restores fetch files over ``file://`` in these tests.
"""

import os
from pathlib import Path

import pytest

from ci.aws import lustre
from nearlinear import cli
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.loader import BlockShuffle, Loader
from nearlinear.errors import ConfigError
from nearlinear.launch.fsx import hydrate, lfs, mount
from tests.core.test_loader_reads import make_dataset


@pytest.fixture
def fsx(tmp_path, monkeypatch) -> lustre.Emulated:
    """An empty file system."""
    import sys

    made = lustre.install(tmp_path / "node", sys.executable)
    monkeypatch.setenv("PATH", f"{made.tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mount, "MOUNTS", made.mounts)
    monkeypatch.setattr(hydrate, "PAUSE", 0.0)
    return made


def in_s3_only(fsx, repository: Path, below: str = "tokens") -> Path:
    """What ``repository`` holds, as a linked folder shows it at first."""
    for path in mount.files(repository):
        name = f"{below}/{path.relative_to(repository)}"
        fsx.appear(name, path.stat().st_size, path.as_uri())
    return fsx.folder / below


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Four shards of 2 MiB."""
    folder = tmp_path_factory.mktemp("s3") / "tokens"
    make_dataset(folder, [2, 2, 2, 2], length=1024, fill=True)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


# The mount.

LIST = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw,errors=remount-ro
36 22 0:51 / {0}/with\\040blank rw,noatime shared:1 master:2 - lustre a@tcp:/b rw,flock
37 36 0:52 / {0}/with\\040blank/inner rw - tmpfs tmpfs rw,size=1k
38 22 0:53 / {0}/wi rw - nfs4 server:/x rw
39 37 0:54 / {0}/with\\040blank/inner ro - xfs /dev/vdb rw
"""


def test_the_innermost_and_latest_mount_counts(tmp_path):
    inner = tmp_path / "with blank" / "inner"
    inner.mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(LIST.format(tmp_path))
    assert mount.of(tmp_path / "with", mounts).kind == "ext4"  # not below "wi"
    found = mount.of(tmp_path / "with blank" / "x", mounts)
    assert found.lustre and found.source == "a@tcp:/b" and found.point == tmp_path / "with blank"
    assert found.options == ("rw", "noatime", "flock")
    assert mount.of(inner, mounts).kind == "xfs"
    assert mount.of(inner, tmp_path / "no such list") is None


def test_this_machines_own_list_is_read(tmp_path):
    if not mount.MOUNTS.exists():
        pytest.skip("this system does not list its mounts")
    found = mount.of(tmp_path)
    assert found.kind and found.options and os.path.ismount(found.point)


def test_a_folder_on_lustre_is_described(fsx, tokens, capsys):
    folder = in_s3_only(fsx, tokens)
    assert cli.main(["fsx", "mount-check", str(folder)]) == 0
    said = capsys.readouterr().out
    source = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com@tcp:/abcdefgh"
    assert f"{folder}: Lustre, {source} on {fsx.folder}" in said
    assert "can be written" in said and "options: rw, relatime, checksum, flock" in said
    assert "1 x 1 MiB" in said and "shard-" in said
    assert "0 of 10 files and 0.0 %" in said


def test_a_folder_elsewhere_is_described_as_far_as_it_goes(tmp_path, capsys):
    assert cli.main(["fsx", "mount-check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not on Lustre but on" in said and "GiB free" in said
    assert "nothing to hydrate" in said


def test_a_folder_that_is_not_there(tmp_path, capsys):
    for verb in ("mount-check", "hydrate", "throughput"):
        assert cli.main(["fsx", verb, str(tmp_path / "none")]) == 2
        assert "is the file system mounted?" in capsys.readouterr().err


def test_without_lfs_it_says_what_it_cannot_tell(fsx, tokens, monkeypatch, capsys):
    folder = in_s3_only(fsx, tokens)
    monkeypatch.setattr(lfs, "there", lambda: False)
    assert cli.main(["fsx", "mount-check", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "layout: lfs is not on this machine" in said
    assert "cannot be told without lfs" in said
    with pytest.raises(ConfigError, match="Lustre client"):
        hydrate.check(folder)


def test_a_folder_that_cannot_be_written(fsx, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(mount.tempfile, "TemporaryFile", refuse)
    assert not mount.look(fsx.folder).writable


def test_what_could_be_better_is_said(fsx, monkeypatch):
    big = fsx.folder / "big"
    with open(big, "wb") as file:
        file.truncate(2 * 2**30)
    fsx.mounts.write_text(fsx.mounts.read_text().replace(",flock", ""))
    said = "\n".join(mount.report(mount.look(fsx.folder)))
    assert "mount with -o relatime,flock" in said
    assert "lfs setstripe -c -1" in said
    monkeypatch.setattr(lfs, "stripes", lambda path: [lfs.Stripes(None, -1, 2**20)])
    assert "lfs setstripe" not in "\n".join(mount.report(mount.look(fsx.folder)))


# Formats of lfs, as the tool prints them.

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
def test_layouts_are_read(text, expected):
    assert [(p.end, p.count, p.size) for p in lfs.parse_stripes(text)] == expected


STATES = """\
/fsx/a: (0x0000000d) released exists archived, archive_id:1
/fsx/b: (0x00000009) exists archived, archive_id:1
/fsx/c: (0x0000000b) exists dirty archived, archive_id:1
/fsx/d: (0x00000000)
/fsx/name: (0x1) with colon: (0x00000000)
/fsx/e: (0x00000001) exists, archive_id:1
"""


def test_states_are_read(monkeypatch):
    monkeypatch.setattr(lfs, "_run", lambda verb, arguments: STATES)
    found = lfs.states([Path("/fsx/a")])
    assert {path.name: state.released for path, state in found.items()} == {
        "a": True, "b": False, "c": False, "d": False, "e": False, "name: (0x1) with colon": False,
    }  # fmt: skip
    assert found[Path("/fsx/c")].archived and not found[Path("/fsx/e")].archived


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("lfs: cannot restore '/fsx/a': Operation not permitted", "run it as root"),
        ("lfs: can't get hsm state for /tmp: Inappropriate ioctl for device", "Inappropriate"),
        ("", "status 1"),
    ],
)
def test_a_refusal_of_lfs_is_told(fsx, error, words):
    (fsx.tools / "lfs").write_text(f'#!/bin/sh\necho "{error}" >&2\nexit 1\n')
    with pytest.raises(ConfigError, match=words):
        lfs.restore([Path("/fsx/a")])


# Hydration.


def test_files_come_in_batches_and_are_counted(fsx, tokens):
    folder, said = in_s3_only(fsx, tokens), []
    files = mount.files(folder)
    last = hydrate.restore(files, at_once=4, say=said.append)
    here = [now.files_here for now in said]
    assert here[0] == 0 and here[-1] == last.files_here == last.files == len(files) == 10
    assert here == sorted(set(here)) and len(here) >= 4  # every change is told, and once
    # Of four that are asked for at once none is done before the four before are.
    assert {4, 8} <= set(here)
    assert last.share == 1 and "all 10 files" in str(last)
    for path in files:
        assert path.read_bytes() == (tokens / path.relative_to(folder)).read_bytes()


def test_what_is_there_is_not_asked_for_again(fsx, tokens, monkeypatch):
    folder = in_s3_only(fsx, tokens)
    hydrate.restore(mount.files(folder))
    monkeypatch.setattr(lfs, "restore", None)
    assert hydrate.restore(mount.files(folder)).share == 1


def test_files_that_never_come_are_named(fsx, tokens, monkeypatch):
    folder = in_s3_only(fsx, tokens)
    monkeypatch.setattr(lfs, "restore", lambda paths: None)
    monkeypatch.setattr(hydrate, "MOST_LOOKS", 3)
    with pytest.raises(ConfigError, match="10 files do not come from S3: lfs hsm_action"):
        hydrate.restore(mount.files(folder))


def test_shards_come_as_the_loader_needs_them(tokens):
    dataset = TokenDataset(tokens, sequence_length=1024, verify="size")
    loader = Loader(dataset, 8, 1, 0, 1, seed=3, blocks=BlockShuffle(1, 2))
    wanted: list[int] = []
    for _ in range(len(dataset) // 8):
        next(loader)
        windows = loader._windows(loader._last_step, 8)
        for shard in dataset.extents(windows)[:, 0].tolist():
            if shard not in wanted:
                wanted.append(shard)
    order = hydrate.first_used(loader.order, dataset)
    assert sorted(order) == [0, 1, 2, 3] and order != [0, 1, 2, 3]
    # A group of two blocks is taken from evenly, so its two may be met in either order.
    assert [set(order[i : i + 2]) for i in (0,)] == [set(wanted[:2])]
    names = [p.name for p in hydrate.in_order(tokens, loader.order, dataset)]
    assert names[:2] == ["index.json", "tokenizer.json"]
    assert names[2::2] == [f"shard-{shard:05d}.bin" for shard in order]
    assert names[3::2] == [f"shard-{shard:05d}.idx" for shard in order]
    plain = [p.name for p in hydrate.in_order(tokens)]
    assert plain[:2] == names[:2] and plain[2:] == sorted(plain[2:])


def test_the_command_hydrates_in_that_order(fsx, tokens, tmp_path, capsys, monkeypatch):
    folder, asked = in_s3_only(fsx, tokens), []
    config = tmp_path / "run.toml"
    config.write_text("[data]\nsequence_length = 64\nshuffle_block_mib = 1\nshuffle_blocks = 2\n")
    assert cli.main(["fsx", "hydrate", str(folder), "--dry-run"]) == 0
    assert "0 of 10 files" in capsys.readouterr().out
    restore = lfs.restore
    monkeypatch.setattr(lfs, "restore", lambda paths: (asked.extend(paths), restore(paths)))
    line = ["fsx", "hydrate", str(folder), "--config", str(config), "--at-once", "2"]
    assert cli.main(line) == 0
    assert "all 10 files" in capsys.readouterr().out
    names = [path.name for path in asked]
    assert names[:2] == ["index.json", "tokenizer.json"]
    for path in mount.files(tokens):
        assert (folder / path.relative_to(tokens)).read_bytes() == path.read_bytes()
    dataset = TokenDataset(folder, sequence_length=64, verify="size")
    loader = Loader(dataset, 1, blocks=BlockShuffle(1, 2))
    shards = hydrate.first_used(loader.order, dataset)
    assert names[2::2] == [f"shard-{shard:05d}.bin" for shard in shards]
