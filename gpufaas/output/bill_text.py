"""A bill as a table or as CSV."""

import csv
import io
import time
from collections.abc import Mapping
from typing import Any

from gpufaas.output.columns import columns

Amounts = Mapping[str, Any]

_GIB_HOUR = (1 << 30) * 3600 * 1e6
_HEAD = ("COMPUTING", "LOADING", "KEPT", "WAITING", "USED", "IDLE", "CONTEXT", "HOST", "DISK")
_TIMES = ("computing_us", "loading_us", "kept_us", "waiting_us")
_MEMORY = ("used_byte_us", "idle_byte_us", "context_byte_us", "host_byte_us", "disk_byte_us")
_FIELDS = (
    "gpu_us",
    *_TIMES,
    "kept_from_others_us",
    *_MEMORY,
)
_NOBODY = "(nobody)"
_MINUTE_S, _HOUR_S = 60, 3600


def bill_text(bill: Mapping[str, Any]) -> str:
    """The bill for people: times, and GiB hours of memory."""
    priced = bill["total"]["cost"] is not None
    currency = bill["currency"]
    head = [bill["by"].upper(), *_HEAD, *([f"COST {currency}".strip()] if priced else [])]
    rows = [head]
    rows += [_row(row["name"] or _NOBODY, row["used"]) for row in bill["rows"]]
    rows.append(_row("total", bill["total"]))
    gpus = bill["gpus"]
    begin = time.strftime("%Y-%m-%d %H:%M", time.gmtime(bill["from_unix_s"]))
    end = time.strftime("%Y-%m-%d %H:%M", time.gmtime(bill["to_unix_s"]))
    return "\n".join([
        f"{begin} to {end} UTC; memory in GiB hours",
        columns(rows),
        f"GPUs: {_time(gpus['gpu_us'])}, of which idle {_time(gpus['idle_gpu_us'])}; memory "
        f"{_gib_hours(gpus['byte_us'])}, of which unused {_gib_hours(gpus['unused_byte_us'])}",
    ])  # fmt: skip


def bill_csv(bill: Mapping[str, Any]) -> str:
    """The bill for programs: whole microseconds, and bytes times microseconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((bill["by"], *_FIELDS, "cost", "currency"))
    for row in bill["rows"]:
        used = row["used"]
        cost = "" if used["cost"] is None else used["cost"]
        writer.writerow((row["name"], *(used[field] for field in _FIELDS), cost, bill["currency"]))
    return text.getvalue()


def _row(name: str, used: Amounts) -> list[str]:
    times, memory = (_time(used[field]) for field in _TIMES), (used[field] for field in _MEMORY)
    cost = [] if used["cost"] is None else [f"{used['cost']:.4f}"]
    return [name, *times, *(_gib_hours(amount) for amount in memory), *cost]


def _time(microseconds: int) -> str:
    seconds = microseconds / 1e6
    if seconds < _MINUTE_S:
        return f"{seconds:.3f} s"
    return f"{seconds / _MINUTE_S:.1f} min" if seconds < _HOUR_S else f"{seconds / _HOUR_S:.2f} h"


def _gib_hours(byte_us: int) -> str:
    return f"{byte_us / _GIB_HOUR:.4f}"
