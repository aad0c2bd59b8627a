"""`gpufaas bill`: who used which GPU time and memory, and what it costs."""

import argparse
import csv
import io
import time
from collections.abc import Mapping
from typing import Any

from common import numerals
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.cells import columns
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api

_GROUPS = ("function", "namespace", "model")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("bill", help="who used which GPU time and memory, and its cost")
    add = parser.add_argument
    add("--by", choices=_GROUPS, default="function", help="one row for each of these (function)")
    add("--since", default="24h", metavar="TIME", help="ago: 90m, 24h, 7d, 4w (24h)")
    add("--csv", action="store_true", help="print CSV, in whole microseconds and bytes")
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    last_s = seconds_ago(options.since)
    answer = scheduler_api(options).get("/bill", by=options.by, last_s=last_s)
    return print_answer(answer, options, bill_csv if options.csv else bill_text)


def seconds_ago(text: str) -> float:
    """The seconds of a time like `90m`, `24h` or `7d`."""
    unit_s = _UNITS_S.get(text[-1:])
    try:
        number = numerals.number(text[:-1])
    except ValueError:
        number = -1.0
    if unit_s is None or number < 0:
        raise CommandError(f"--since {text!r}: a number and s, m, h, d or w is expected, as 24h")
    return number * unit_s


Amounts = Mapping[str, Any]

_GIB_HOUR = (1 << 30) * 3600 * 1e6
_HEAD = ("COMPUTING", "LOADING", "KEPT", "WAITING", "USED", "IDLE", "CONTEXT", "HOST", "DISK")
_TIMES = ("computing_us", "loading_us", "kept_us", "waiting_us")
_MEMORY = ("used_byte_us", "idle_byte_us", "context_byte_us", "host_byte_us", "disk_byte_us")
_FIELDS = ("gpu_us", *_TIMES, "kept_from_others_us", *_MEMORY)
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
    return text.getvalue().rstrip("\n")


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
