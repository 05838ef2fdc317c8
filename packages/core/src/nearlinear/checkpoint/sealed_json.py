"""Sealed JSON: an encoding with a hash of itself, read with limits, and an optional signature.

The document begins with its format number and the SHA-256 of all its bytes, in which the 64 digits
of the hash count as zeros. Any change of any byte is detected before the JSON is parsed. The hash
detects damage; a signature (HMAC-SHA256 with a secret key) in a file beside the document also
detects a document written by somebody without the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import CheckpointDamaged, CheckpointError
from ..own_hash import NO_HASH, insert_hash, is_intact

MAX_DEPTH = 64
"""Nesting of arrays and objects."""
KEY_VARIABLE, KEY_FILE_VARIABLE = "NEARLINEAR_CHECKPOINT_KEY", "NEARLINEAR_CHECKPOINT_KEY_FILE"
"""Environment variables with the key of signatures, or with the path of a file that contains it."""
MIN_KEY_BYTES = 16
_PREFIX = re.compile(rb'\{"format":(\d{1,9}),"sha256":"([0-9a-f]{64})"[,}]')


def seal(version: int, data: dict[str, Any]) -> bytes:
    """Encode ``data`` as sealed JSON of a format ``version``."""
    return insert_hash(encode({"format": version, "sha256": NO_HASH} | data))


def encode(data: Any) -> bytes:
    """Return the canonical encoding of JSON: no white space, ASCII, keys in their order."""
    return json.dumps(data, separators=(",", ":")).encode()


def sealed_version(text: bytes) -> int | None:
    """Return the format version of an intact sealed document, or None if ``text`` is none."""
    found = _PREFIX.match(text)
    if found is None or not is_intact(text, found.span(2)):
        return None
    return int(found[1])


def parse(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for duplicate keys and for deep nesting."""
    if _depth(text) > MAX_DEPTH:
        raise ValueError(f"arrays and objects are nested more than {MAX_DEPTH} deep")
    data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    if not isinstance(data, dict):
        raise ValueError("the document is not an object")
    return data


def _depth(text: bytes) -> int:
    """Return the nesting depth of JSON without parsing it."""
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = b"".join(unescaped.split(b'"')[::2])  # every other part is a string
    steps = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
    brackets = structure.translate(None, bytes(set(range(256)) - steps.keys()))
    return max(accumulate(map(steps.__getitem__, brackets)), default=0)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)[:80]!r} occurs more than once")
    return found


def signing_key() -> bytes | None:
    """Return the key of signatures from the environment, or None. Raises CheckpointError."""
    text, file = os.environ.get(KEY_VARIABLE), os.environ.get(KEY_FILE_VARIABLE)
    if text and file:
        raise CheckpointError(
            f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set in the environment: remove one"
        )
    if not text and not file:
        return None
    try:
        key = text.encode() if text else Path(str(file)).read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{KEY_FILE_VARIABLE} = {file} cannot be read ({getattr(error, 'strerror', error)}): "
            "give the path of the key of signed checkpoints, or remove the variable"
        ) from None
    key = key.strip()
    if len(key) < MIN_KEY_BYTES:
        raise CheckpointError(
            f"the key of {KEY_VARIABLE if text else KEY_FILE_VARIABLE} has {len(key)} bytes: use "
            f"at least {MIN_KEY_BYTES}, as from: openssl rand -hex 32"
        )
    return key


def sign(text: bytes, key: bytes) -> bytes:
    """Return the content of the signature file of a document."""
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode() + b"\n"


def check_signature(text: bytes, signature: bytes | None, key: bytes, name: str) -> None:
    """Raise CheckpointDamaged unless ``signature`` is that of the document ``name``."""
    if signature is None:
        raise CheckpointDamaged(
            f"{name} is not signed, and a key is set in the environment: sign it with nearlinear "
            f"checkpoint sign if you trust it, or remove {KEY_VARIABLE} and {KEY_FILE_VARIABLE}"
        )
    if not hmac.compare_digest(signature.strip(), sign(text, key).strip()):
        raise CheckpointDamaged(
            f"{name} is not what was signed with this key: it has changed, or another key signed it"
        )
