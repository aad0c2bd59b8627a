"""Pieces of many subcommands' parsers, and the secret of a cluster, which an option names."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gpu_manager.credentials import load_secret
from gpufaas.log_format import FORMATS
from gpufaas.stack_folder import state_folder

# The type of `add_subparsers`; the standard library has no public name for it, nor a subscript.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001


def add_verb(verbs: Commands, name: str, help_text: str) -> argparse.ArgumentParser:
    """A command's verb, whose options may also stand before it if the command has them.

    The verb's options have no defaults, so that options before the verb keep their values.
    Commands have one vocabulary: `list` for all, `get` for one, `set` or `deploy`, `remove`.
    """
    return verbs.add_parser(name, help=help_text, argument_default=argparse.SUPPRESS)


def print_answer(
    answer: Any, options: argparse.Namespace, text: Callable[[Any], str], *, indent: int | None = 1
) -> int:
    """Print an answer as JSON if the options say so, else its text; the exit code of success."""
    print(json.dumps(answer, indent=indent) if options.json else text(answer))
    return 0


def add_log_level_option(parser: argparse.ArgumentParser, setting: str) -> None:
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", dest=setting, choices=levels, help="(info)")


def add_log_format_option(parser: argparse.ArgumentParser) -> None:
    """The option for the format of log lines; GPUFAAS_LOG_FORMAT sets it for a whole stack."""
    parser.add_argument("--log-format", choices=FORMATS, help="of log lines (text)")


def add_secret_option(parser: argparse.ArgumentParser, missing: str = "") -> None:
    file = f"the cluster's secret{missing} (GPUFAAS_STATE/secret; /var/lib/gpufaas for root)"
    parser.add_argument("--secret-file", metavar="FILE", help=file)


def cluster_secret(
    option: str | None, environment: Mapping[str, str], *, make: bool = False
) -> bytes:
    """The secret in the option's file, or in the default file; daemons `make` a missing one."""
    path = Path(option) if option else default_secret_file(environment)
    return load_secret(path, make=make)


def default_secret_file(environment: Mapping[str, str]) -> Path:
    """The file of the variable, or the file in this user's state folder."""
    named = environment.get("GPUFAAS_SCHEDULER_SECRET_FILE")
    return Path(named) if named else state_folder(environment) / "secret"
