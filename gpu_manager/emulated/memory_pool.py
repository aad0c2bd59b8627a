"""The memory pool of an emulated GPU: made, as Python sees it, and what each model takes of it."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_manager.emulated.process_memory import trim_malloc

# Address space, of which only what is used counts.
_MOST_BYTES, _LEAST_BYTES = 1 << 38, 1 << 32


class MemoryPool:
    """Where this process's tensors come from, once it is installed. Thread-safe.

    It shrinks after calls to its floor, and to nothing when no call comes for long. Then malloc
    gives back what the threads of many models left in its arenas, too.
    """

    def __init__(self, library: Path) -> None:
        """Load the library, which changes nothing yet."""
        self.calls = ctypes.CDLL(str(library))
        for name in ("used_by", "peak_of", "forget", "used", "take_peak", "trim"):
            getattr(self.calls, f"gpufaas_pool_{name}").restype = ctypes.c_size_t
        self.is_installed = False
        self._floor = PoolFloor()
        self._lock = threading.Lock()
        self._used = threading.Event()
        self._together_bytes = 0
        self._weights_bytes: dict[int, int] = {}

    def install(self) -> None:
        """Have torch take every tensor from the pool from now on; without effect if it does."""
        if self.is_installed:
            return
        size_bytes = _MOST_BYTES
        while not self.calls.gpufaas_pool_install(ctypes.c_size_t(size_bytes)):
            if size_bytes <= _LEAST_BYTES:
                raise MemoryError(f"no address space for a pool of {size_bytes} bytes")
            size_bytes //= 2
        self.is_installed = True
        threading.Thread(target=self._shrink_when_idle, name="pool", daemon=True).start()

    @property
    def used_bytes(self) -> int:
        """The bytes of all blocks in use, each in whole pages if it is large."""
        return int(self.calls.gpufaas_pool_used())

    def trim(self, keep_bytes: int) -> int:
        """Give free pages back to the system until at most `keep_bytes` are kept; return how many.

        Blocks that are smaller than a page cannot be given back alone.
        """
        with self._lock:
            return self._trim(keep_bytes)

    def shrink(self) -> None:
        """After a call: keep only as much as the calls of the last seconds used at once."""
        self._shrink_to_floor(int(self.calls.gpufaas_pool_take_peak()))
        self._used.set()

    def limit_together(self, most_bytes: int) -> None:
        """Let all models have no more than this at once, their weights included.

        What goes beyond is refused as memory that others have.
        """
        with self._lock:
            self._together_bytes = most_bytes
            self._limit()

    def note_weights(self, model: int, weights_bytes: int) -> None:
        """Count this model's weights, which lie outside, among what all may have."""
        with self._lock:
            self._weights_bytes[model] = weights_bytes
            if not weights_bytes:
                del self._weights_bytes[model]
            if self._together_bytes:
                self._limit()

    def _limit(self) -> None:
        outside_bytes = sum(self._weights_bytes.values())
        room_bytes = max(0, self._together_bytes - outside_bytes)
        self.calls.gpufaas_pool_limit_together(ctypes.c_size_t(room_bytes))

    def _trim(self, keep_bytes: int) -> int:
        return int(self.calls.gpufaas_pool_trim(ctypes.c_size_t(keep_bytes)))

    def _shrink_to_floor(self, used_bytes: int) -> int:
        """Keep the floor, for so many bytes in use now; return it."""
        with self._lock:
            floor_bytes = self._floor.used(used_bytes, time.monotonic())
            self._trim(max(0, floor_bytes - self.used_bytes))
        return floor_bytes

    def _shrink_when_idle(self) -> None:
        while True:
            self._used.wait()
            self._used.clear()
            time.sleep(self._floor.window_s)
            if self._shrink_to_floor(0):
                self._used.set()  # look again: the floor falls
            else:
                trim_malloc()


_WINDOW_S = 1.0


class PoolFloor:
    """What stays mapped between calls: the most in use in this window and the last; pure."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self.window_s = window_s
        self._ends_s = float("-inf")
        self._before_bytes = self._now_bytes = 0

    def used(self, used_bytes: int, now_s: float) -> int:
        self._advance(now_s)
        self._now_bytes = max(self._now_bytes, used_bytes)
        return max(self._before_bytes, self._now_bytes)

    def _advance(self, now_s: float) -> None:
        if now_s < self._ends_s:
            return
        is_next = now_s < self._ends_s + self.window_s
        self._before_bytes = self._now_bytes if is_next else 0
        self._now_bytes = 0
        self._ends_s = now_s + self.window_s


class PooledMemory:
    """What one model has of a pool that other models of the process use as well.

    A model is a number from 1; what no model asked for is number 0's.
    """

    gives_back = True

    def __init__(self, pool: MemoryPool, model: int) -> None:
        self._pool = pool
        self._calls = pool.calls
        self._model = model

    def used_bytes(self) -> int:
        return int(self._calls.gpufaas_pool_used_by(self._model))

    def limit(self, most_bytes: int) -> None:
        self._calls.gpufaas_pool_limit(self._model, ctypes.c_size_t(most_bytes))

    def note_weights(self, weights_bytes: int) -> None:
        self._pool.note_weights(self._model, weights_bytes)

    def lift(self) -> None:
        """Close the account of a model that has left."""
        self._pool.note_weights(self._model, 0)
        self._calls.gpufaas_pool_forget(self._model)

    def watch(self) -> None:
        self._calls.gpufaas_pool_watch(self._model)

    def peak_bytes(self) -> int:
        return int(self._calls.gpufaas_pool_peak_of(self._model))

    def release(self) -> None:
        self._pool.trim(0)

    def after_call(self) -> None:
        self._pool.shrink()

    def adopt_thread(self) -> None:
        self._calls.gpufaas_pool_adopt_thread(self._model)

    def computing(self) -> AbstractContextManager[None]:
        """Charge the model with what threads without a model take, while no other one computes."""
        return _Charged(self._calls, self._model)


class _Charged:
    """One computation; every call has one, so it is no generator."""

    def __init__(self, calls: Any, model: int) -> None:
        self._calls = calls
        self._model = model
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = self._calls.gpufaas_pool_enter(self._model)

    def __exit__(self, *_: object) -> None:
        self._calls.gpufaas_pool_leave(self._model, self._before)


# The pool's library is compiled for this machine's torch, once, and kept in the user's cache.
#
# torch itself is not imported: a manager never does that.

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
