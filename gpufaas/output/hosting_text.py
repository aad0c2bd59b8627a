"""How a model is hosted, as text: its runtime, the models in its process, its share of the GPU."""

from collections.abc import Iterable, Mapping
from typing import Any

from common.gpu_wishes import PROCESS, STREAM, WHOLE


def hosting_text(row: Mapping[str, Any]) -> str:
    """`process`, or `stream of 3, 25 % of the GPU`; `-` while it is unknown."""
    text = row.get("runtime") or "-"
    if text == STREAM and row.get("process_models"):
        text = f"{text} of {row['process_models']}"
    share = row.get("gpu_share") or WHOLE
    return text if share == WHOLE else f"{text}, {100 * share:.3g} % of the GPU"


def hostings_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """How the copies of a model are hosted: each way once."""
    return "; ".join(dict.fromkeys(map(hosting_text, rows))) or "-"


def unusual_hosting(row: Mapping[str, Any]) -> str:
    """The same in brackets; empty for a process that has all of the GPU, and while unknown."""
    text = hosting_text(row)
    return "" if text in ("-", PROCESS) else f" ({text})"
