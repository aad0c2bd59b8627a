"""The `gpufaas` command: reads the arguments and hands over to one module a subcommand."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from cache_manager.model.errors import CacheError
from common.build_identity import commit, release
from common.errors import CommonError
from gpu_manager.errors import GpuManagerError
from gpufaas.errors import CommandError
from gpufaas.extras import install_command, needs
from gpufaas.options.help_texts import explain_command, explain_lacking
from scheduler.model.errors import SchedulerError
from torch_shim.collector_pause import without_collections

EXIT_BAD_USE = 2

COMMANDS = (
    *("up", "down", "exec", "check", "gpu-manager", "scheduler", "gateway"),
    *("status", "top", "bill", "policy", "quota", "explain", "trace", "workflow"),
    *("models", "prefetch", "evict", "pin", "unpin"),
    *("simulate", "reproduce", "replay", "demo", "doctor", "token", "config", "completion"),
)
# The module of `gpufaas.commands` that describes and runs a subcommand, if its name is another.
_MODULES = {
    "down": "up",
    "exec": "execute",
    "gpu-manager": "gpu_manager",
    **dict.fromkeys(("prefetch", "evict", "pin", "unpin"), "models"),
}
# These need torch; what others may lack is in the extra `control`.
_NEED_GPU = ("exec", "check", "gpu-manager")

_INVALID = re.compile(
    r"(?:argument (?:COMMAND|verb): )?invalid choice: '([^']*)' \(choose from (.*)\)"
)
_FEW = 10


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_USE, f"{self.prog}: {_INVALID.sub(_suggestion, message)}\n")


def _suggestion(invalid: re.Match[str]) -> str:
    """The nearest of the words to choose from; these, if they are few and none is near."""
    word, choices = invalid[1], re.findall(r"[\w:.-]+", invalid[2])
    near = get_close_matches(word, choices, 1)
    if near:
        return f"there is no {word!r}: did you mean {near[0]!r}?"
    shown = ", ".join(choices) if len(choices) <= _FEW else "--help lists what there is"
    return f"there is no {word!r}: {shown}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, or 2 with a line on standard error for a bad value."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        make_parser(arguments).print_help()
        return 0
    try:
        options = make_parser(arguments).parse_args(arguments)
        options.environment = dict(os.environ)
        code: int = options.run(options)
    except (SchedulerError, CacheError, GpuManagerError, CommonError, CommandError) as error:
        print(f"gpufaas {arguments[0]}: {error}", file=sys.stderr)
        return EXIT_BAD_USE
    except BrokenPipeError:  # the reader of our output has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def make_parser(arguments: Sequence[str]) -> _Parser:
    """The named command's parser, or all commands': a command imports only what it needs."""
    parser = _Parser(prog="gpufaas", description="GPUs for OpenFaaS functions.")
    version = f"gpufaas {release()} {commit()[:12]}".rstrip() if "--version" in arguments else ""
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser
    )
    named = bool(arguments) and arguments[0] in COMMANDS
    chosen = arguments[:1] if named else COMMANDS
    lacks: dict[str, list[str]] = {}
    for name in dict.fromkeys(_MODULES.get(command, command) for command in chosen):
        try:
            with without_collections():
                module = importlib.import_module(f"gpufaas.commands.{name}")
        except ModuleNotFoundError as error:
            if named:
                raise CommandError(needs(_extra(arguments[0]), error.name)) from error
            for each in COMMANDS:
                if _MODULES.get(each, each) == name:
                    lacks.setdefault(install_command(_extra(each)), []).append(each)
        else:
            module.add_parser(commands)
    for name, command in commands.choices.items():
        explain_command(command, name)
    explain_lacking(parser, lacks)
    return parser


def _extra(command: str) -> str:
    return "gpu" if command in _NEED_GPU else "control"


if __name__ == "__main__":
    sys.exit(main())
