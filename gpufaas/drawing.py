"""Pictures on demand: matplotlib is an optional extra, loaded only where something is drawn."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from gpufaas.errors import CommandError


def pictures() -> ModuleType:
    """`scheduler.sim.pictures`, or one line that says how to get what it needs."""
    try:
        return import_module("scheduler.sim.pictures")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise CommandError(
            "pictures need matplotlib: pip install 'gpufaas[report]' (or run make setup)"
        ) from error


def folder(name: str) -> Path:
    """The folder of that name, made if need be; one line where that cannot be."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write to {name}: {error.strerror}") from error
    return path
