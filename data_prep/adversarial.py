"""Strings on which encoders of text differ: what a fast one must get right before it is used.

Each defect known of byte-pair encoders has a family here: control tokens in the text, runs of
white space of every kind, contractions, digits of many scripts, marks that combine, what lies
outside the basic plane, long runs. `strings(n)` yields as many as asked, the same every time;
`around` has those of a tokenizer's own tokens.
"""

import random
from collections.abc import Iterable, Iterator

FIXED = (
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

_PIECES = (
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\x0b", "\x1c",
    "\x85", "\u200b", "'s", "'ll", "'T", "’re", "the", " The", "ing", "Ünï", "ß", "ſ", "İ", "ı",
    "7", "42", "1234", "٣", "½", "Ⅷ", "一", "語", "ไทย", "हि", "\u0301", "\u20dd",
    "👍🏽", "🇨", "\U00020000",
    "!", "...", "—", "_", "$", "€", "()", "{}", "</s>", "<s>", "<|endoftext|>", "<|", "|>", "\x00",
    "\ufeff", "\ufffd", "\ue000", "zz", "QQ", "xX", "a b", ".\n", ",", ";", "http://", "\\n", "%20",
)  # fmt: skip


def strings(count: int) -> Iterator[str]:
    """`FIXED`, then mixtures of odd pieces and of any characters, `count` in sum."""
    yield from FIXED[:count]
    draw = random.Random(0)
    for number in range(len(FIXED), count):
        if number % 4:
            yield "".join(draw.choices(_PIECES, k=draw.randint(1, 12)))
        else:
            yield "".join(_any_character(draw) for _ in range(draw.randint(1, 24)))


def around(tokens: Iterable[str]) -> Iterator[str]:
    """Each of a tokenizer's own tokens alone, inside of words and between them, twice, in capitals.

    They are looked for in text before it is cut into words, and how is a setting of each.
    """
    for token in tokens:
        yield token
        yield f"a{token}b {token} c, {token}{token}  {token}\n{token}1 é{token} {token}s_{token}"
        yield f"{token.upper()} {token.lower()} \u00a0{token}\t{token[:-1]} {token[1:]}. "


def _any_character(draw: random.Random) -> str:
    """One of the lower planes, more often a low one; never half of a surrogate pair."""
    code = draw.randrange(draw.choice((0x80, 0x250, 0x3000, 0xD800, 0x30000)))
    return chr(code) if not 0xD800 <= code < 0xE000 else "\ud7ff"
