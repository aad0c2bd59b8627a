"""What the subcommands' argument parsers have in common."""

import argparse
from typing import TypeAlias

from gpufaas.logs import FORMATS

# What `add_subparsers` answers: the standard library gives it no public name, nor a subscript.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001


def add_verb(verbs: Commands, name: str, help_text: str) -> argparse.ArgumentParser:
    """A command's verb; its options may stand before it as well, where the command has them too.

    What is not said after the verb must leave alone what was said before it, so that the verb's
    options have no defaults: those of the command hold.
    """
    return verbs.add_parser(name, help=help_text, argument_default=argparse.SUPPRESS)


def add_log_format_option(parser: argparse.ArgumentParser) -> None:
    """How log lines look; GPUFAAS_LOG_FORMAT says it for all processes of a stack."""
    parser.add_argument("--log-format", choices=FORMATS, help="of log lines (text)")
