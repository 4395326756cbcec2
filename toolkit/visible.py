"""Text of others, as a terminal may be given it: shown, not obeyed."""

from __future__ import annotations

import re

# Control characters but tab and newline (ECMA-48), and those that turn text around (UAX 9).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with a replacement character for each one that a terminal would obey; CR LF becomes LF."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def escaped(document: str) -> str:
    """The same JSON document, with an escape (RFC 8259, section 7) for each such character in its strings."""
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", document)
