"""Index of a checkpoint: its tensors, the files that hold their shards, and file hashes.

    step-00000100/index.json                  written last; a folder without it is no checkpoint
    step-00000100/index.json.hmac             signature of the index, if a key is set
    step-00000100/rank-00003-of-00016.safetensors

The index is sealed JSON. It lists the size and SHA-256 of every safetensors file, and the metadata
of every file contain `Index.content`, a hash of the rest of the index: files and index that do not
belong together are refused. Neither format can carry code. `read`, which loading and verification
share, refuses any index that `write` does not produce.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import storage
from ..errors import CheckpointDamaged, CheckpointError
from ..storage import StoragePath
from . import sealed_json
from .index_schema import (
    BINDING,
    DTYPES,
    FORMAT,
    UNSEALED_FORMAT,
    FileEntry,
    Index,
    describe,
    parse,
    shard_key,
)

NAME = "index.json"
SIGNATURE = "index.json.hmac"
MAX_BYTES, DATA_PER_INDEX_BYTE = 2**24, 16
"""Limit of the index: 16 MiB, and one more byte per 16 bytes in the other files."""
_REMEDY = "resume from another checkpoint, and delete this one"


def write(found: Index, folder: StoragePath) -> None:
    """Write the index atomically, which makes ``folder`` a checkpoint.

    Raises ValueError for an index that `read` would refuse, and CheckpointError for an invalid
    signing key.
    """
    data = describe(found.step, found.world, found.tensors, found.values)
    data["files"] = {n: {"bytes": f.bytes, "sha256": f.sha256} for n, f in found.files.items()}
    text = sealed_json.seal(FORMAT, data)
    check_size(len(text), sum(file.bytes for file in found.files.values()))
    written = sealed_json.parse(text)
    del written["format"]
    parse(written, sealed=True)
    key = sealed_json.signing_key()
    if key is None:
        (folder / SIGNATURE).remove()
    else:
        (folder / SIGNATURE).put(sealed_json.sign(text, key))
    (folder / NAME).put(text)


def read(folder, signed: bool = True) -> Index:
    """Read and validate the index of the checkpoint in ``folder``.

    Args:
        folder: The checkpoint.
        signed: Require a signature if a key is set in the environment.

    Raises:
        CheckpointDamaged: The index is missing, changed, invalid, or not signed as required.
        CheckpointError: The index is of a newer format, or cannot be accessed.
    """
    folder = storage.as_path(folder)
    path = folder / NAME
    text = _read_text(folder)
    key = sealed_json.signing_key() if signed else None
    if key is not None:
        sealed_json.check_signature(text, _read_signature(folder), key, str(path))
    version = sealed_json.sealed_version(text)
    if version not in (None, FORMAT):
        raise CheckpointError(
            f"{path} has format {version}, and this version reads formats {UNSEALED_FORMAT} and "
            f"{FORMAT}: load it with the version of nearlinear that wrote it"
        )
    changed = f"{path} has changed since it was written: its SHA-256 does not match; {_REMEDY}"
    if version is None and b'"sha256"' in text[:64]:
        raise CheckpointDamaged(changed)
    try:
        data = sealed_json.parse(text)
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is not valid JSON ({error}): {_REMEDY}") from None
    stated = data.pop("format", None)
    if version is None and stated != UNSEALED_FORMAT:
        raise CheckpointDamaged(changed)
    try:
        return parse(data, sealed=version is not None)
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is invalid ({error}): {_REMEDY}") from None


def missing_protections(found: Index) -> str:
    """Return the protections that a checkpoint of the older format lacks, or ""."""
    if found.content:
        return ""
    return (
        f"it has format {UNSEALED_FORMAT}: its index has no checksum, so that changed offsets, "
        "settings or steps in the index cannot be detected; save it again to add the checksum"
    )


def sign(folder: StoragePath) -> None:
    """Write the signature of an index. Raises CheckpointError without a key."""
    key = sealed_json.signing_key()
    if key is None:
        raise CheckpointError(
            f"there is no key to sign {folder}: set {sealed_json.KEY_VARIABLE} or "
            f"{sealed_json.KEY_FILE_VARIABLE} in the environment"
        )
    (folder / SIGNATURE).put(sealed_json.sign(_read_text(folder), key))


def check_size(size: int, data_bytes: int) -> None:
    """Raise ValueError if an index of ``size`` bytes is too large for ``data_bytes`` of tensors."""
    limit = MAX_BYTES + data_bytes // DATA_PER_INDEX_BYTE
    if size > limit:
        raise ValueError(f"it has {size} bytes, and {limit} are allowed with the files beside it")


def _read_text(folder: StoragePath) -> bytes:
    path, sizes = folder / NAME, folder.file_sizes()
    if NAME not in sizes:
        state = "is not a complete checkpoint" if folder.exists() else "does not exist"
        raise CheckpointDamaged(
            f"{folder} {state}: {NAME} is missing; choose a folder written by nl.save"
        )
    try:
        check_size(sizes[NAME], sum(sizes.values()) - sizes[NAME])
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is invalid ({error}): {_REMEDY}") from None
    try:
        return path.read()  # StorageUnreachable is no damage
    except OSError as error:
        raise unreadable(path, error) from None


def _read_signature(folder: StoragePath) -> bytes | None:
    try:
        return b"".join((folder / SIGNATURE).stream(0, 1024))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(folder / SIGNATURE, error) from None


def unreadable(path: StoragePath, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read: damaged if its medium is."""
    text = f"{path} cannot be read ({error.strerror or error}): make it readable, or {_REMEDY}"
    gone = isinstance(error, FileNotFoundError) or error.errno == 5  # EIO
    return CheckpointDamaged(text) if gone else CheckpointError(text)


def find_missing_file(folder: StoragePath, found: Index) -> str:
    """Return a message about the first missing or truncated file, or "" if there is none."""
    sizes = folder.file_sizes()
    for name, file in found.files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != file.bytes:
            return f"{name} has {sizes[name]} bytes instead of {file.bytes}"
    return ""


def check_content(
    path: StoragePath, file: FileEntry, read_hash: Callable[[], FileEntry] | None = None
) -> None:
    """Raise CheckpointDamaged unless the size and SHA-256 of a file are those of ``file``.

    Args:
        path: The file.
        file: Entry in the index.
        read_hash: Returns the digest that the caller computed while reading, to avoid a second
            pass over the file.
    """
    try:
        found = read_hash() if read_hash else hash_file(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if found != file:
        raise CheckpointDamaged(f"{path} has changed since it was written: {_REMEDY}")


def hash_file(path) -> FileEntry:
    """Return the size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    for chunk in storage.as_path(path).stream():
        digest.update(chunk)
        size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def header_faults(
    name: str, values: Any, found: Index, keys: Iterable[str] | None = None
) -> Iterator[str]:
    """Yield a message for every difference between the header of a file and the index.

    Args:
        name: Name of the file.
        values: The opened file, with the interface of safetensors' `safe_open`.
        found: The index.
        keys: Keys whose tensors to check, all by default.
    """
    binding = (values.metadata() or {}).get(BINDING, "")
    if binding != found.content:
        yield f"{name} belongs to another index: they were not written by the same save"
        return
    expected = {
        shard_key(tensor, number): (entry.dtype, list(shard.shape))
        for tensor, entry in found.tensors.items()
        for number, shard in enumerate(entry.pieces.get(name, ()))
    }
    present = set(values.keys())
    if keys is None:
        for key in sorted(expected.keys() - present):
            yield f"{name} has no {key}, which is in the index"
        for key in sorted(present - expected.keys()):
            yield f"{name} has {key}, which is not in the index"
    names = {word: str(dtype).removeprefix("torch.") for dtype, word in DTYPES.items()}
    for key in sorted(present & expected.keys() if keys is None else keys):
        if key not in present:
            yield f"{name} has no {key}, which is in the index"
            continue
        part = values.get_slice(key)
        dtype, shape = names.get(part.get_dtype(), part.get_dtype()), list(part.get_shape())
        if (dtype, shape) != expected[key]:
            wanted = "{} {}".format(*expected[key])
            yield f"{name} has {key} as {dtype} {shape} instead of {wanted}"
