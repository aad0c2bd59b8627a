"""`gpufaas reproduce`: the evaluation of the thesis again, written to docs/."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  typeshed's name


def add_parser(commands: "Commands") -> None:
    """Describe the command's options."""
    parser = commands.add_parser(
        "reproduce", help="every policy on the thesis's workload, in seconds"
    )
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the picture (out)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    print(f"to be written to {options.out}")
    return 0
