"""The `gpufaas` command: reads the arguments and hands over to one module a subcommand."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cache_manager.errors import CacheError
from gpu_manager.errors import GpuManagerError
from gpufaas.errors import CommandError
from scheduler.errors import SchedulerError

EXIT_BAD_USE = 2

# The module that describes and runs each subcommand.
_MODULES = {
    "up": "up",
    "down": "up",
    "exec": "execute",
    "check": "check.command",
    "gpu-manager": "manager",
    "scheduler": "scheduler",
    "gateway": "gateway",
    "load": "load.command",
    "status": "status",
    "top": "top.command",
    "policy": "policy",
    "explain": "explain",
    "trace": "trace",
    "models": "models",
    "prefetch": "models",
    "evict": "models",
    "pin": "models",
    "unpin": "models",
    "simulate": "simulate",
    "reproduce": "reproduce",
    "replay": "replay",
    "demo": "demo",
    "doctor": "doctor",
    "token": "credentials",
}
# The extra with what a subcommand needs, where it is not `gpu`.
_EXTRA = {
    "scheduler": "control",
    "gateway": "control",
    "up": "control",
    "down": "control",
    "load": "control",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_USE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is its own, or 2 for a bad value, said in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser(arguments).parse_args(arguments)
        options.environment = dict(os.environ)
        code: int = options.run(options)
    except (SchedulerError, CacheError, GpuManagerError, CommandError) as error:
        print(f"gpufaas {arguments[0]}: {error}", file=sys.stderr)
        return EXIT_BAD_USE
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser(arguments: Sequence[str]) -> _Parser:
    """Knows the command that is asked for, or all: no command waits for another one's imports."""
    parser = _Parser(prog="gpufaas", description="GPUs for OpenFaaS functions.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    asked = _MODULES.get(arguments[0]) if arguments else None
    for name in [asked] if asked else dict.fromkeys(_MODULES.values()):
        try:
            module = importlib.import_module(f"gpufaas.{name}")
        except ModuleNotFoundError as error:
            if asked:
                raise CommandError(
                    f"needs the package {error.name}: install gpufaas[{_EXTRA.get(asked, 'gpu')}]"
                ) from error
        else:
            module.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
