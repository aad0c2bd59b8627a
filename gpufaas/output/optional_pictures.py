"""Loads the modules that draw, which need the optional matplotlib, only when a command draws."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from gpufaas.errors import CommandError
from gpufaas.extras import install_command

STYLE = "gpufaas.output.bar_pictures"


def load_pictures(module: str = STYLE) -> ModuleType:
    """A module that draws; CommandError if matplotlib is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise CommandError(f"pictures need matplotlib: {install_command('report')}") from error


def make_folder(name: str) -> Path:
    """The folder, made if it is missing; CommandError if that fails."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write to {name}: {error.strerror}") from error
    return path
