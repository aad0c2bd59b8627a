"""Times and amounts as deployments write them: 1m30s, 128Mi, 1.5GB, 250m of a core."""

import math
import re

_MEMORY = re.compile(
    r"(\d+(?:\.\d+)?)(?:e(\d{1,2})| *([kmgtpe]?)(i?)(b?))", re.IGNORECASE | re.ASCII
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_CPU = re.compile(r"(\d+(?:\.\d+)?)([num]?)", re.ASCII)
_PARTS = {"": 1, "m": 1_000, "u": 1_000_000, "n": 1_000_000_000}
_LONGEST_AMOUNT = 32  # characters of a text
_MOST_BYTES = 1 << 60
_MOST_CPUS = 1_000_000


def memory_bytes(text: str) -> int:
    """The bytes: `Mi`, `MiB` and Docker's `m` are 1024 squared, `M`, `MB` and `e6` 1000 squared."""
    match = _MEMORY.fullmatch(text.strip()) if len(text) <= _LONGEST_AMOUNT else None
    if match is None:
        raise ValueError("an amount of memory such as 128Mi or 2GiB is expected")
    number, exponent, prefix, binary, byte = match.groups(default="")
    if exponent:
        amount = float(f"{number}e{exponent}")
    else:
        as_docker = prefix.islower() and prefix != "k" and not byte
        base = 1024 if binary or as_docker else 1000
        amount = float(number) * base ** _POWERS[prefix.lower()]
    if amount < 1:
        raise ValueError("the least amount is one byte")
    if amount > _MOST_BYTES:
        raise ValueError("the largest amount is 1Ei, 2 to the power of 60 bytes")
    return int(amount)


def shown(amount_bytes: int) -> str:
    """An amount of memory for display: `512 MiB`, `15.8 GiB`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if amount_bytes >= 1 << power:
            return f"{round(amount_bytes / (1 << power), 1):g} {unit}"
    return f"{amount_bytes} B"


def cpus(text: str) -> float:
    """Cores: `2`, `0.5`, or thousandths of a core as `250m`, millionths as `u`, billionths `n`."""
    match = _CPU.fullmatch(text.strip()) if len(text) <= _LONGEST_AMOUNT else None
    if match is None:
        raise ValueError("an amount of processor such as 250m or 2 is expected")
    amount = float(match[1]) / _PARTS[match[2]]
    if amount <= 0:
        raise ValueError("the amount must be above 0")
    if amount > _MOST_CPUS:
        raise ValueError(f"the largest amount is {_MOST_CPUS} processors")
    return amount


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
# No text can be read in two ways: of a long one all would be tried.
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(_NUMBER, re.ASCII)
_PART = re.compile(_NUMBER + "(ns|us|µs|ms|s|m|h)", re.ASCII)
_LONGEST_DURATION = 64  # characters of a text


def seconds(text: str) -> float:
    """The duration in seconds; ValueError if the text is no duration."""
    text = text.strip().replace("\N{GREEK SMALL LETTER MU}", "µ")
    if len(text) > _LONGEST_DURATION:
        raise ValueError("the duration is too long")
    if _PLAIN.fullmatch(text):
        found_s = float(text)
    elif text and not _PART.sub("", text):
        found_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    else:
        raise ValueError("a duration such as 90, 1m30s or 250ms is expected")
    if not math.isfinite(found_s):
        raise ValueError("the duration is too long")
    return found_s
