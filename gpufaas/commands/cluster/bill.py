"""`gpufaas bill`: who used which GPU time and memory, and what it costs."""

import argparse
import json

from common import numerals
from gpufaas.errors import CommandError
from gpufaas.options.subparsers import Commands
from gpufaas.output.bill_text import bill_csv, bill_text
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api

_GROUPS = ("function", "namespace", "model")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("bill", help="who used which GPU time and memory, and its cost")
    add = parser.add_argument
    add("--by", choices=_GROUPS, default="function", help="one row for each of these (function)")
    add("--since", default="24h", metavar="TIME", help="ago: 90m, 24h, 7d, 4w (24h)")
    add("--csv", action="store_true", help="print CSV, in whole microseconds and bytes")
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    last_s = seconds_ago(options.since)
    found = scheduler_api(options).get("/bill", by=options.by, last_s=last_s)
    if options.json:
        print(json.dumps(found, indent=1))
    elif options.csv:
        print(bill_csv(found), end="")
    else:
        print(bill_text(found))
    return 0


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
