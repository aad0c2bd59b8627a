"""Amounts as Kubernetes and Docker write them: 128Mi, 1.5GB, 250m of a core."""

import math
import re

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_CPU = re.compile(r"(\d+(?:\.\d+)?)(m?)")


def memory_bytes(text: str) -> int:
    """The bytes: `Mi`, `MiB` and Docker's `m` are 1024 squared, `M` and `MB` 1000 squared."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError("an amount of memory such as 128Mi or 2GiB is expected")
    number, prefix, binary, byte = match.groups()
    as_docker = prefix.islower() and prefix != "k" and not byte
    base = 1024 if binary or as_docker else 1000
    found = float(number) * base ** _POWERS[prefix.lower()]
    if not math.isfinite(found) or found < 1:
        raise ValueError("the least amount is one byte")
    return int(found)


def shown(amount_bytes: int) -> str:
    """An amount of memory for display: `512 MiB`, `15.8 GiB`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if amount_bytes >= 1 << power:
            return f"{round(amount_bytes / (1 << power), 1):g} {unit}"
    return f"{amount_bytes} B"


def cpus(text: str) -> float:
    """Cores: `2`, `0.5`, or thousandths of a core as `250m`."""
    match = _CPU.fullmatch(text.strip())
    if match is None:
        raise ValueError("an amount of processor such as 250m or 2 is expected")
    found = float(match[1]) / (1000 if match[2] else 1)
    if not math.isfinite(found) or found <= 0:
        raise ValueError("the amount must be above 0")
    return found
