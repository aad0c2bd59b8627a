"""Compiles the pool for this machine's torch, once, and keeps the result in the user's cache.

torch itself is not imported: a manager never does that.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

_SOURCE = Path(__file__).with_name("memory_pool.cpp")
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")


class PoolNotBuilt(Exception):
    """The pool cannot be compiled here; the message says why."""


def pool_library() -> Path:
    """The compiled pool: found in the user's cache, or made there."""
    base = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - a program's own convention
    cache = (Path(base) if base else Path.home() / ".cache") / "gpufaas" / "pool"
    built = cache / f"memory_pool-{_recipe()}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache, prefix="pool.") as scratch:
            made = Path(scratch) / "pool.so"
            _compile(made)
            made.replace(built)
    return built


def _recipe() -> str:
    words = (_SOURCE.read_text(encoding="utf-8"), metadata.version("torch"), *_FLAGS)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:24]


def _compile(target: Path) -> None:
    compiler = os.environ.get("CXX") or "c++"  # noqa: TID251 - a program's own convention
    if shutil.which(compiler) is None:
        raise PoolNotBuilt(f"there is no C++ compiler ({compiler})")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise PoolNotBuilt("torch is not installed")
    folder = Path(torch.origin).parent
    places = (f"-I{folder / 'include'}", f"-L{folder / 'lib'}")
    command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(target), *places, "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PoolNotBuilt(f"it does not compile: {done.stderr[-2000:]}")
