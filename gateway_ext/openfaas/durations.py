"""Times as OpenFaaS writes them: Go durations (`1m30s`, `250ms`) or plain seconds (`90`)."""

import math
import re

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
# No text can be read in two ways: of a long one all would be tried.
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(_NUMBER, re.ASCII)
_PART = re.compile(_NUMBER + "(ns|us|µs|ms|s|m|h)", re.ASCII)
_LONGEST = 64  # characters of a text


def seconds(text: str) -> float:
    """The duration in seconds; ValueError if the text is no duration."""
    text = text.strip().replace("\N{GREEK SMALL LETTER MU}", "µ")
    if len(text) > _LONGEST:
        raise ValueError("the duration is too long")
    found_s = float(text) if _PLAIN.fullmatch(text) else _go_seconds(text)
    if not math.isfinite(found_s):
        raise ValueError("the duration is too long")
    return found_s


def _go_seconds(text: str) -> float:
    parts = list(_PART.finditer(text))
    if not parts or "".join(part.group() for part in parts) != text:
        raise ValueError("a duration such as 90, 1m30s or 250ms is expected")
    return sum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
