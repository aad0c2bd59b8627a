"""`gpufaas status`: a scheduler's cluster, or a GPU manager's node; refreshed on a terminal."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gpufaas.options.subparsers import Commands
from gpufaas.output.cluster_text import cluster_text
from gpufaas.output.node_text import node_text
from gpufaas.remote.http_request import NoAnswer
from gpufaas.remote.manager_admin import request_admin
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api

Answer = dict[str, Any]

_CLEAR = "\x1b[H\x1b[J"


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
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
    """What to look at again and again, and its text."""
    if options.address is not None:
        ask = partial(request_admin, options.address, options.credential, do="status")
        return ask, node_text
    return partial(scheduler_api(options).get, "/cluster"), cluster_text


def _run(options: argparse.Namespace) -> int:
    look, text = _what(options)
    if options.json or options.once or not sys.stdout.isatty():
        found = look()
        print(json.dumps(found, indent=1) if options.json else text(found))
        return 0
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
