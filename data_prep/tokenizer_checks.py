"""Adversarial strings that a fast encoder must encode like the reference before it is used.

The strings cover the known defects of byte-pair encoders: control tokens in text, runs of every
kind of white space, contractions, digits of many scripts, combining marks, characters outside the
basic plane, and long runs.
"""

import random
from collections.abc import Iterable, Iterator

_FIXED = (
    "", " ", "\n", "Hello world", "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<|endoftext",
    "</s>", "a</s>b", "<s> x", "[SEP][CLS]", "<|im_end|>\n", "<|eot_id|>", "<unk>", "<pad> <eos>",
    "   \n\n\t  x  \n", "trailing spaces   ", "\r\n\r\n", "\r \r\n \n\r", "a  b   c    d",
    "it's they'll I'VE don'T we're 's 'S 'ſ ’s", "1234567890 3.14159 ٣٤٥ ½ Ⅷ ①", "1 22 333 4444",
    "naïve café Zoë Ünïcödé e\u0301 n\u0303",
    "日本語のテキスト 中文 한국어 ไทย עברית العربية हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 \u200d\u200b", "\x00\x01\x7f\x85\xa0\u1680\u2028\u3000\ufeff\ufffd",
    "!?" * 40 + "_-_" * 10, "def f(x):\n    return x ** 2  # note\n\n\tif x:\n", "ſ K Å ﬁ 𝔘𝔫𝔦 ǅ",
    "\U0010ffff\ue000\u0378", "a" * 3000, " " * 3000, "\n" * 700, "ab \n" * 300, "0" * 900,
)  # fmt: skip

_FRAGMENTS = (
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\x0b", "\x1c",
    "\x85", "\u200b", "'s", "'ll", "'T", "’re", "the", " The", "ing", "Ünï", "ß", "ſ", "İ", "ı",
    "7", "42", "1234", "٣", "½", "Ⅷ", "一", "語", "ไทย", "हि", "\u0301", "\u20dd",
    "👍🏽", "🇨", "\U00020000",
    "!", "...", "—", "_", "$", "€", "()", "{}", "</s>", "<s>", "<|endoftext|>", "<|", "|>", "\x00",
    "\ufeff", "\ufffd", "\ue000", "zz", "QQ", "xX", "a b", ".\n", ",", ";", "http://", "\\n", "%20",
)  # fmt: skip


def adversarial_strings(count: int) -> Iterator[str]:
    """Yield `count` strings, the same on every call: fixed ones, then random mixtures."""
    yield from _FIXED[:count]
    draw = random.Random(0)
    for number in range(len(_FIXED), count):
        if number % 4:
            yield "".join(draw.choices(_FRAGMENTS, k=draw.randint(1, 12)))
        else:
            yield "".join(_random_character(draw) for _ in range(draw.randint(1, 24)))


def strings_with_tokens(tokens: Iterable[str]) -> Iterator[str]:
    """Yield strings that contain a tokenizer's added tokens in different contexts.

    Added tokens are matched before text is cut into words, by settings of each token.
    """
    for token in tokens:
        yield token
        yield f"a{token}b {token} c, {token}{token}  {token}\n{token}1 é{token} {token}s_{token}"
        yield f"{token.upper()} {token.lower()} \u00a0{token}\t{token[:-1]} {token[1:]}. "


def _random_character(draw: random.Random) -> str:
    """Draw a character, low code points more often; never a surrogate."""
    code = draw.randrange(draw.choice((0x80, 0x250, 0x3000, 0xD800, 0x30000)))
    return chr(code) if not 0xD800 <= code < 0xE000 else "\ud7ff"
