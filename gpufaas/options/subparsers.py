"""Pieces of the subcommands' argument parsers."""

import argparse
from typing import TypeAlias

from gpufaas.local.log_format import FORMATS

# The type of `add_subparsers`; the standard library has no public name for it, nor a subscript.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001


def add_verb(verbs: Commands, name: str, help_text: str, *aliases: str) -> argparse.ArgumentParser:
    """A command's verb, whose options may also stand before it if the command has them.

    The verb's options have no defaults, so that options before the verb keep their values.
    Commands have one vocabulary: `list` for all, `show` for one, `set` or `deploy`, `remove`.
    """
    return verbs.add_parser(
        name, help=help_text, aliases=aliases, argument_default=argparse.SUPPRESS
    )


def add_log_format_option(parser: argparse.ArgumentParser) -> None:
    """The option for the format of log lines; GPUFAAS_LOG_FORMAT sets it for a whole stack."""
    parser.add_argument("--log-format", choices=FORMATS, help="of log lines (text)")
