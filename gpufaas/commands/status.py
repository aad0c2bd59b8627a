"""`gpufaas status`: a scheduler's cluster, or a GPU manager's node; refreshed on a terminal."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from common.numerals import format_size
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.cells import columns
from gpufaas.output.cluster_text import cluster_text
from gpufaas.remote.http_request import NoAnswer
from gpufaas.remote.manager_api import request_admin
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api

Answer = dict[str, Any]

_CLEAR = "\x1b[H\x1b[J"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("status", help="GPUs, models, queues and latencies, live")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds between two looks (1)"
    )
    parser.add_argument("--address", help="of a GPU manager: show its node instead")
    parser.add_argument("--credential", default="", help="the administrator's, if not this user's")
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _what(options: argparse.Namespace) -> tuple[Callable[[], Answer], Callable[[Answer], str]]:
    if options.address is not None:
        ask = partial(request_admin, options.address, options.credential, do="status")
        return ask, node_text
    return partial(scheduler_api(options).get, "/cluster"), cluster_text


def _run(options: argparse.Namespace) -> int:
    look, text = _what(options)
    if options.json or options.once or not sys.stdout.isatty():
        return print_answer(look(), options, text)
    try:
        while True:
            try:
                shown = text(look())
            except NoAnswer as error:  # a new leader may be elected soon
                shown = str(error)
            print(f"{_CLEAR}{shown}", flush=True)
            time.sleep(max(0.1, options.every))
    except KeyboardInterrupt:
        return 0


_HEAD = ("GPU", "MODELS", "GRANTED", "OF")
_TRANSFERS = ("TRANSFERS", "DIRECTION", "CLASS", "BYTES", "WAITED")


def node_text(node: dict[str, Any]) -> str:
    store = node["store"]
    lines = [
        f"node {node['node']}   policy {node['policy']}   leases {node['leases']}   "
        f"waiting {node['waiting']}   hits {node['hits']}   misses {node['misses']}",
        f"weights in memory {format_size(store['bytes'])} of {format_size(store['budget_bytes'])}, "
        f"on disk {format_size(store['disk_bytes'])}",
        "",
        columns([_HEAD, *(_gpu(gpu) for gpu in node["gpus"])]),
    ]
    moved = [row for gpu in node["gpus"] for row in _moved(gpu)]
    return "\n".join([*lines, "", columns([_TRANSFERS, *moved])] if moved else lines)


def _gpu(gpu: dict[str, Any]) -> tuple[str, ...]:
    granted, whole = format_size(gpu["granted_bytes"]), format_size(gpu["memory_bytes"])
    return gpu["id"], str(gpu["models"]), granted, whole


def _moved(gpu: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each direction and class in which anything was moved."""
    for row in gpu["transfers"]:
        if row["bytes"]:
            size, waited = format_size(row["bytes"]), f"{row['waited_s']:.3f} s"
            yield gpu["id"], row["direction"].replace("_", " "), row["class"], size, waited
