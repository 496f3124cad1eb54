"""Text that others have written, on its way to a terminal or a file.

Keys and names of files may contain anything: escapes that move the cursor or set the title of a window, letters that
turn the direction of what follows, halves of letters. None of that is printed as it is.
"""

import codecs
import re
from typing import Any

# Control characters but the line's end; marks of direction; halves of letters, which no encoding has.
_UNPRINTABLE = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")

_PLAIN = {"×": "x", "–": "-", "…": "...", "│": "|", "─": "-", "•": "*"}
"""ASCII replacements of the tools' own signs."""


def printable(text: str) -> str:
    """Escape the characters that must not reach a terminal."""
    if text.isascii() and text.isprintable():  # nearly all are, in tables of a million cells
        return text
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def be_printable(*streams: Any) -> None:
    """Have streams write something for what their encoding has not, instead of failing."""
    codecs.register_error(_ERRORS, _replaced)
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ERRORS)


_ERRORS = "checkpoint_tools.plain"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter) or _escaped(letter) for letter in letters), error.end


def _escaped(letter: str) -> str:
    return letter.encode("ascii", "backslashreplace").decode()
