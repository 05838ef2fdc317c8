"""The AWS API documentation inside botocore: a real English corpus that needs no network.

Each operation of the newest API version of a service is one document: its description, then its
request and response members, as plain paragraphs. Repeated member descriptions are dropped; they
would be a fifth of the corpus. About 17 MB of technical prose, Apache-2.0. The text changes with
the botocore version, so tests must not depend on exact counts.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

from nearlinear.errors import DataError

_BLOCK_TAGS = frozenset(
    "p li ul ol dl dt dd note important pre div br table tr h1 h2 h3 h4 title section para".split()
)
_SPACES = re.compile(r"\s+")
_SPACE_BEFORE_STOP = re.compile(r" ([.,;:)])(?=\s|$)")


def botocore_documents() -> Iterator[str]:
    """Yield the documents of the installed botocore in a fixed order, without exact duplicates.

    Raises `DataError` if botocore is not installed.
    """
    documents, members = _TextSet(), _TextSet()
    for service in sorted(p for p in data_folder().iterdir() if p.is_dir()):
        model = _newest_model(service)
        for text in _operations(model, members) if model else ():
            if documents.is_new(text):
                yield text


def data_folder() -> Path:
    """Return the folder of service descriptions, without importing botocore."""
    spec = find_spec("botocore")
    folder = Path(spec.origin).parent / "data" if spec and spec.origin else None
    if folder is None or not folder.is_dir():
        raise DataError(
            "the botocore source needs the botocore package, which is not installed: "
            "run `pip install botocore`, or prepare your own text with `data_prep text`"
        )
    return folder


def plain_text(markup: str) -> str:
    """Convert HTML to text: a paragraph per block element, unescaped, spaces collapsed."""
    parser = _Paragraphs()
    parser.feed(markup)
    parser.close()
    return "\n\n".join(parser.finish())


class _TextSet:
    """Set of texts, stored as 16-byte digests."""

    def __init__(self):
        self._digests: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        known = digest in self._digests
        self._digests.add(digest)
        return not known


class _Paragraphs(HTMLParser):
    """Collects the text of an HTML document by block element."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self._fragments: list[str] = []
        self._paragraphs: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag in _BLOCK_TAGS:
            self._break()

    def handle_endtag(self, tag):
        if tag in _BLOCK_TAGS:
            self._break()

    def handle_data(self, data):
        self._fragments.append(data)

    def finish(self) -> list[str]:
        self._break()
        return self._paragraphs

    def _break(self):
        text = _SPACES.sub(" ", "".join(self._fragments)).strip()
        self._fragments.clear()
        if text:
            self._paragraphs.append(_SPACE_BEFORE_STOP.sub(r"\1", text))


def _newest_model(service: Path) -> dict | None:
    """Load a service's newest API version (version folders are named by date)."""
    for version in sorted((p for p in service.iterdir() if p.is_dir()), reverse=True):
        for name in ("service-2.json.gz", "service-2.json"):
            path = version / name
            if path.is_file():
                raw = path.read_bytes()
                return json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    return None


def _operations(model: dict, members: _TextSet) -> Iterator[str]:
    service = model["metadata"].get("serviceFullName", model["metadata"].get("serviceId", ""))
    for name, operation in sorted(model.get("operations", {}).items()):
        own = plain_text(operation.get("documentation", ""))
        request = _members(model, operation.get("input"), members)
        response = _members(model, operation.get("output"), members)
        if not (own or request or response):
            continue
        parts = [f"{service}: {name}", own]
        parts += ["Request", *request] if request else []
        parts += ["Response", *response] if response else []
        yield "\n\n".join(part for part in parts if part)


def _members(model: dict, reference: dict | None, members: _TextSet) -> list[str]:
    """Return `name: description` of each member of a shape not seen before, in order."""
    shape = model["shapes"].get(reference["shape"], {}) if reference else {}
    texts = []
    for name, member in shape.get("members", {}).items():
        markup = member.get("documentation") or _shape_documentation(model, member)
        if markup and members.is_new(f"{name} {markup}") and (text := plain_text(markup)):
            texts.append(f"{name}: {text}")
    return texts


def _shape_documentation(model: dict, member: dict) -> str:
    return model["shapes"].get(member.get("shape"), {}).get("documentation", "")
