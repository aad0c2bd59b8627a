"""What the subcommands' argument parsers have in common."""

import argparse
from typing import TypeAlias

# What `add_subparsers` answers: the standard library gives it no public name, nor a subscript.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
