"""What tests build once a machine: kept in the user's cache folder, named by its recipe."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(name: str, recipe: bytes, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes by this recipe: found in the cache, or made there now.

    Of several test processes that lack the file one makes it while the others wait. The file gets
    its name when it is complete, so that no process sees half of it.
    """
    folder = cache_folder()
    found = folder / f"{name}-{hashlib.sha256(recipe).hexdigest()[:16]}"
    if not found.exists():
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(f"{name}-*.*"):  # of a process that was killed meanwhile
                shutil.rmtree(left)
            if not found.exists():
                _make(found, make)
    return found


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/gpufaas`, or `~/.cache/gpufaas`."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "gpufaas"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _make(found: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=found.parent, prefix=f"{found.name}.") as scratch:
        complete = Path(scratch) / found.name
        make(complete)
        complete.replace(found)
