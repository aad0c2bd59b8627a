"""`gpufaas reproduce`: repeats a paper's evaluation, and writes its page.

What it runs is in `research/`, beside the product in a checkout, and in no wheel.
"""

import argparse
from importlib import import_module
from pathlib import Path

from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands

_THESIS = "thesis"
_PAPERS = (_THESIS, "sage", "esg", "interference", "tenants")
SEEDS = 20
CHECKOUT = Path(__file__).parents[2]


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "reproduce", help="repeat a paper's evaluation and write it down with pictures"
    )
    add = parser.add_argument
    add("--paper", choices=_PAPERS, default=_THESIS, help="whose evaluation (thesis)")
    add("--seeds", type=int, metavar="K", help=f"seeds to average over ({SEEDS}; thesis)")
    folder = "folder of evaluation.md and, by --paper or --policies, evaluation/*.md (out)"
    add("--out", default="out", metavar="DIR", help=folder)
    add("--policies", action="store_true", help="instead: every policy on every other's ground")
    search = "only search for the setting with most of the claims, print the best (thesis)"
    add("--calibrate", action="store_true", help=search)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not (CHECKOUT / "research" / "reproduce.py").is_file():
        raise CommandError(
            "reproduce needs a checkout of gpufaas, whose folder research/ no installation has: "
            "clone the repository and run it there, after make setup"
        )
    code: int = import_module("research.reproduce").run(options)
    return code
