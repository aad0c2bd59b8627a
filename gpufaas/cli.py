"""The `gpufaas` command: reads the arguments and hands over to one module a subcommand."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cache_manager.errors import CacheError
from gpufaas import demo, reproduce, simulate
from gpufaas.errors import CommandError
from scheduler.errors import SchedulerError

EXIT_BAD_USE = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_USE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 for a bad value, said in one line."""
    parser = _Parser(prog="gpufaas", description="GPUs for OpenFaaS functions.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for module in (simulate, reproduce, demo):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (SchedulerError, CacheError, CommandError) as error:
        print(f"gpufaas {options.command}: {error}", file=sys.stderr)
        return EXIT_BAD_USE
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
