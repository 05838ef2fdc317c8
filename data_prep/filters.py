"""Quality filters and the signatures of near-duplicates: datatrove's blocks, on one document each.

A filter looks at one document alone, and so does a signature: neither depends on who does which
split. What a filter keeps it may have changed (C4's takes out lines).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import xxhash

from nearlinear.errors import DataError

FILTERS = {
    "gopher": ("GopherRepetitionFilter", "GopherQualityFilter"),
    "c4": ("C4QualityFilter",),
    "fineweb": ("FineWebQualityFilter",),
}
"""names on the command line, and classes of `datatrove.pipeline.filters`, in order"""
BANDS = 14
"""hashes of a near-duplicate's signature: two documents that share one are taken for alike.

MinHash as FineWeb has it: words in fives, 14 bands of 8 hashes, so documents that share 72 % of
their fives are found as often as not, and 80 % in 92 of 100 cases (datatrove's defaults).
"""


def datatrove_version() -> str:
    """Of the blocks: another one may keep other documents. Raises `DataError` without them."""
    try:
        from datatrove.utils.word_tokenizers import load_word_tokenizer

        load_word_tokenizer("en").word_tokenize("a word")
        return version("datatrove")
    except (ImportError, PackageNotFoundError) as error:
        raise DataError(
            f"filters and near-duplicates need datatrove and spaCy ({error}): run "
            "`pip install 'packages/core[datatrove]' spacy`"
        ) from None


class Filters:
    """Filters by their names, one after another; `dropped` counts what each took out, and why."""

    def __init__(self, names: Sequence[str]):
        self.dropped: Counter[str] = Counter()
        self._blocks = [(name, block()) for name in names for block in _classes(name)]

    def __call__(self, texts: Iterable[str]) -> Iterator[str]:
        """Those of `texts` that pass, as the filters leave them."""
        from datatrove.data import Document

        for text in texts:
            document = Document(text.encode("utf-8", "replace").decode("utf-8"), id="")
            for name, block in self._blocks:
                found = block.filter(document)
                passed, why = found if isinstance(found, tuple) else (found, "")
                if not passed:
                    self.dropped[f"{name}: {why}" if why else name] += 1
                    break
            else:
                yield document.text


def _classes(name: str) -> list[type]:
    from datatrove.pipeline import filters

    return [getattr(filters, kind) for kind in FILTERS[name]]


def minhash_config():
    """datatrove's `MinhashConfig`. Its xxhash takes text, which xxhash 3.6 and later refuse."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    return MinhashConfig(num_buckets=BANDS, hash_config=HashConfig(hash_fc="sha1"))


@cache
def signatures() -> "Signatures":
    """A `Signatures`, made once in a process: its tokenizer takes a second."""
    return Signatures()


class Signatures:
    """The MinHash signatures of documents, each band of them hashed into one number."""

    def __init__(self):
        from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

        # What it would write in a folder is not asked for.
        self._block = MinhashDedupSignature(".", minhash_config())

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """uint64 [documents, 14]; zeros for a document of fewer than five words."""
        rows = np.zeros((len(texts), BANDS), np.uint64)
        for row, text in zip(rows, texts, strict=True):
            shingles = self._block.get_shingles(text)
            if shingles.size:
                bands = np.asarray(self._block.get_signature(shingles), np.uint64)
                row[:] = [xxhash.xxh3_64_intdigest(band.tobytes()) for band in bands]
        return rows
