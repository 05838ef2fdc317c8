"""Masks of personal data: e-mail addresses, and IP addresses that are reachable from everywhere.

The places that are masked equal those of datatrove's formatter. Every address gets the same mask,
from the names and numbers that are reserved for documentation (RFC 2606, RFC 5737), so that a
document has one result.
"""

import ipaddress
import re

EMAIL, IP = "email@example.com", "192.0.2.1"
"""Masks."""

_LOCAL = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+/=?^_`{|}~-"
)
"""Characters before the @ (RFC 5322, atext)."""
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_DOMAIN = re.compile(
    rf"(?:{_LABEL}\.)+{_LABEL}|\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]"
)
_ADDRESS = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}")
_POINTS = re.compile(r"\d\.\d+\.\d")
"""A part of every IP address, which few other texts have; found faster than `_ADDRESS`."""


def mask(text: str) -> str:
    """Return a text with masks in place of e-mail and IP addresses."""
    if "@" in text:
        text = _mask_emails(text)
    if _POINTS.search(text):
        text = _ADDRESS.sub(lambda found: IP if _is_public(found[0]) else found[0], text)
    return text


def _mask_emails(text: str) -> str:
    parts, end, at = [], 0, text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        begin = _local_part(text, at, end) if domain else at
        if domain and begin < at:
            parts += [text[end:begin], EMAIL]
            end = domain.end()
        at = text.find("@", max(at + 1, end))
    return "".join([*parts, text[end:]])


def _local_part(text: str, at: int, limit: int) -> int:
    """Return where the part before the @ at ``at`` begins, not before ``limit``; ``at`` if nowhere.

    It begins at the first border of a word of a run of parts with a single point in between.
    """
    first = place = at
    while place > limit:
        place -= 1
        if text[place] in _LOCAL:
            first = place
        elif text[place] != "." or first != place + 1 or first == at:
            break
    return next((p for p in range(first, at) if text[p] in _LOCAL and _is_border(text, p)), at)


def _is_border(text: str, place: int) -> bool:
    return _in_word(text[place]) != (place > 0 and _in_word(text[place - 1]))


def _in_word(symbol: str) -> bool:
    return symbol.isalnum() or symbol == "_"


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:  # zeros in front
        return False
