"""`gpufaas explain`: a request's placement decisions and their outcomes."""

import argparse
import json

from gpufaas.options.subparsers import Commands
from gpufaas.output.foreign_text import plain
from gpufaas.output.request_text import request_text
from gpufaas.remote.scheduler_api import add_scheduler_options, request_story, scheduler_api


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("explain", help="why a request was placed where it was")
    parser.add_argument("request", nargs="?", help="its id; without one, the latest ids")
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    scheduler = scheduler_api(options)
    if options.request is None:
        found = scheduler.get("/explain")
        print(json.dumps(found) if options.json else "\n".join(map(plain, found)))
        return 0
    found = request_story(scheduler, options.request)
    print(json.dumps(found, indent=1) if options.json else request_text(found))
    return 0
