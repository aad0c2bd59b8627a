"""`gpufaas status`: a scheduler's cluster as a table, refreshed on a terminal."""

import argparse
import json
import sys
import time

from gpufaas.options.subparsers import Commands
from gpufaas.output.cluster_text import cluster_text
from gpufaas.remote.http_request import NoAnswer
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api

_CLEAR = "\x1b[H\x1b[J"


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("status", help="GPUs, models, queues and latencies, live")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds between two looks (1)"
    )
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    scheduler = scheduler_api(options)
    if options.json or options.once or not sys.stdout.isatty():
        found = scheduler.get("/cluster")
        print(json.dumps(found, indent=1) if options.json else cluster_text(found))
        return 0
    try:
        while True:
            try:
                shown = cluster_text(scheduler.get("/cluster"))
            except NoAnswer as error:  # a new leader may be elected soon
                shown = str(error)
            print(f"{_CLEAR}{shown}", flush=True)
            time.sleep(max(0.1, options.every))
    except KeyboardInterrupt:
        return 0
