"""Forks: what keeps a process from being forked, what each fork has of its own, how it ends."""

import atexit
import ctypes
import fcntl
import importlib
import importlib.abc
import importlib.machinery
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# What keeps a process from being forked: whatever a copy would lack, or share with the others.
#
# A fork has one thread, and shares with its parent every connection, pipe, lock and shared mapping,
# which a process that is started anew has for itself. Regular files are no obstacle: each fork
# opens its own.

_SELF = Path("/proc/self")
_ENDING_S, _LOOK_S = 2.0, 0.005
_HARMLESS_DEVICES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
# Weights and large tensors laid out by the shim: before a fork it makes their memory private.
_PRIVATE_BEFORE_FORK = ("/memfd:gpufaas-weights", "/memfd:gpufaas-block")
_ONLY_AT_OPEN = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def obstacle(own: Collection[int]) -> str:
    """Why this process cannot be forked; empty if it can. `own` are the runtime's descriptors."""
    threads = _threads_that_stay()
    if threads:
        return f"it has started threads ({', '.join(sorted(set(threads))[:5])})"
    if _has_children():
        return "it has started a process"
    if any(signal.getitimer(timer)[0] for timer in _TIMERS):
        return "it has set a timer"
    for number, target in _descriptors(own):
        if why := _why_not_copied(number, target):
            return f"it holds {why}"
    shared = next(_shared_mappings(), "")
    return f"it shares memory with other processes ({shared})" if shared else ""


def reopen_files(own: Collection[int]) -> None:
    """Give this fork its own open files: copies would share their positions with the template."""
    for number, target in _descriptors(own):
        if not stat.S_ISREG(os.fstat(number).st_mode):
            continue
        flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~_ONLY_AT_OPEN
        inheritable, position = os.get_inheritable(number), os.lseek(number, 0, os.SEEK_CUR)
        try:
            fresh = os.open(f"/proc/self/fd/{number}", flags)
        except OSError as error:
            raise OSError(error.errno, f"{target} cannot be opened again") from error
        os.lseek(fresh, position, os.SEEK_SET)
        os.dup2(fresh, number, inheritable)
        os.close(fresh)


def _threads_that_stay() -> list[str]:
    """The names of all other threads, once those that are about to end have ended."""
    for _ in range(round(_ENDING_S / _LOOK_S)):  # a process that is held up looks as often
        if not _other_threads():
            break
        time.sleep(_LOOK_S)
    return _other_threads()


def _other_threads() -> list[str]:
    names = []
    for folder in (_SELF / "task").iterdir():
        if folder.name != str(os.getpid()):
            with suppress(OSError):  # it has ended
                name = (folder / "comm").read_bytes()  # of 15 bytes: it may end within a character
                names.append(name.decode(errors="replace").strip())
    return names


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descriptors(own: Collection[int]) -> Iterator[tuple[int, str]]:
    for name in os.listdir(_SELF / "fd"):  # noqa: PTH208 - the numbers, of one look
        if int(name) not in own:
            with suppress(FileNotFoundError):  # that of the look itself
                yield int(name), str((_SELF / "fd" / name).readlink())


def _why_not_copied(number: int, target: str) -> str:
    mode = os.fstat(number).st_mode
    if stat.S_ISDIR(mode) or target in _HARMLESS_DEVICES:
        return ""
    if stat.S_ISREG(mode):
        locked = "\nlock:" in (_SELF / "fdinfo" / str(number)).read_text()
        return f"a lock on {target}" if locked else ""
    return f"a connection ({target})" if stat.S_ISSOCK(mode) else target


def _shared_mappings() -> Iterator[str]:
    for line in (_SELF / "maps").read_text().splitlines():
        _, rights, _, _, _, *path = line.split(maxsplit=5)
        name = path[0] if path else "no file"
        if rights.endswith("s") and "w" in rights and not name.startswith(_PRIVATE_BEFORE_FORK):
            yield name


# What each fork has of its own: random numbers, threads of numeric libraries, its name.
#
# A copy of a process lacks the threads of the pools that its parent has started, and waits for them
# forever. So OpenMP, which torch uses, runs its parallel regions in the thread that comes to them;
# the number of threads that torch shows, and that its traces depend on, stays what it is. OpenBLAS
# starts a pool when it is loaded, can end it, and starts it again when it is needed.

_OPENBLAS = "openblas"
_OPENMP = ("libgomp", "libomp", "libiomp")


class SingleThread:
    """The thread pools of a template, which do not start, and of a fork, which may."""

    def __init__(self) -> None:
        """Create this before the handler is imported."""
        self._levels: list[tuple[ctypes.CDLL, int]] = []
        sys.meta_path.insert(0, _AfterImport("torch", self._torch_imported))

    def end_pools(self) -> None:
        """Have OpenBLAS end its threads, as it does by itself before a fork."""
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if threads > 1 and _loaded(_OPENBLAS):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)

    def end(self) -> None:
        """Let this fork have as many threads as a process of its own."""
        for library, levels in self._levels:
            library.omp_set_max_active_levels(levels)

    def _torch_imported(self) -> None:
        note_torch_seed()
        for library in map(ctypes.CDLL, sorted(_loaded(*_OPENMP))):
            self._levels.append((library, library.omp_get_max_active_levels()))
            library.omp_set_max_active_levels(0)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a step once a module has been executed, whoever finds the module."""

    def __init__(self, name: str, step: Callable[[], None]) -> None:
        self._name = name
        self._step = step
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the next finder has for the module, with the step added."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True  # another finder that asks all others must not come back here
        try:
            asked = (finder.find_spec(fullname, path, target) for finder in sys.meta_path[:])
            spec = next(filter(None, asked), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            self._add_step(spec.loader)
        return spec

    def _add_step(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._step()

        vars(loader)["exec_module"] = exec_module


def _loaded(*words: str) -> set[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if any(word in line.rpartition("/")[2] for word in words)]
    return {path for line in named if Path(path := line.split(maxsplit=5)[5]).is_file()}


# The random generators of a fork: fresh ones, unless the handler chose their seed at import.
#
# A process that is started anew draws its seeds from the system. Forks would all draw the same
# numbers, so each gets seeds of its own. A generator that the handler has seeded itself begins in
# every instance as the handler left it.

_WORDS, _WORD_BITS = 624, 32  # of the Mersenne twister
_MOST_BLOCKS = 2000


class RandomStates:
    """The states of the generators of `random`, numpy and torch after the handler's import."""

    def __init__(self) -> None:
        """Create this before the handler is imported."""
        self._before = random.getstate()
        self._kept: list[tuple[Any, Any]] = []  # functions, and the states to call them with
        self._drawn: list[Any] = []  # functions that draw a new seed

    def imported(self) -> None:
        """Note which generators the handler has seeded by now."""
        self._kept, self._drawn = [], []
        if _was_seeded(self._before, random.getstate()):
            self._kept.append((random.setstate, random.getstate()))
        else:
            self._drawn.append(random.seed)
        if "numpy.random" in sys.modules:
            self._note_numpy(sys.modules["numpy.random"])
        if "torch" in sys.modules:
            self._note_torch(sys.modules["torch"])

    def begin_anew(self) -> None:
        """Seed or restore every generator, in a fork, or after calls that drew from them."""
        for restore, state in self._kept:
            restore(state)
        for draw in self._drawn:
            draw()

    def _note_numpy(self, numpy_random: ModuleType) -> None:
        # Seeding drops the source that the generator had drawn its first state from.
        if numpy_random.mtrand._rand._bit_generator.seed_seq is None:  # noqa: SLF001 - nothing else tells
            self._kept.append((numpy_random.set_state, numpy_random.get_state()))
        else:
            self._drawn.append(numpy_random.seed)

    def _note_torch(self, torch: ModuleType) -> None:
        if getattr(torch, _FIRST_SEED, None) == torch.initial_seed():
            self._drawn.append(torch.seed)
        else:
            self._kept.append((torch.set_rng_state, torch.get_rng_state()))


_FIRST_SEED = "_gpufaas_first_seed"


def note_torch_seed() -> None:
    torch = importlib.import_module("torch")
    setattr(torch, _FIRST_SEED, torch.initial_seed())


def _was_seeded(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether the second state cannot be reached from the first by drawing numbers alone."""
    generator = random.Random()
    generator.setstate(before)
    for _ in range(_MOST_BLOCKS):
        if generator.getstate()[1][:-1] == after[1][:-1]:
            return False
        generator.getrandbits(_WORDS * _WORD_BITS)
    return True


_ENVIRONMENT_START, _ENVIRONMENT_END = 47, 48  # positions in /proc/self/stat after the name


def rename(before: str, after: str) -> None:
    """Replace this process's name in the variables that /proc/PID/environ shows.

    A fork has its parent's. By them the gateway finds what an instance has left behind. The names
    have the same length, so that nothing else moves.
    """
    if len(before) != len(after):
        raise ValueError(f"{after!r} is not as long as {before!r}")
    _overwrite(before.encode(), after.encode())


def hide(variable: str) -> None:
    """Take a variable out of those that /proc/PID/environ shows."""
    shown = variable.encode()
    _overwrite(shown, bytes(len(shown)))


def _overwrite(old: bytes, new: bytes) -> None:
    if old == new:
        return
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[_ENVIRONMENT_START]), int(fields[_ENVIRONMENT_END])
    shown = ctypes.string_at(start, end - start)
    position = shown.find(old)
    while position >= 0:
        ctypes.memmove(start + position, new, len(new))
        position = shown.find(old, position + len(old))


# How a process ends: with what its program has registered for it, at once, or with its parent.

_SET_DEATH_SIGNAL = 1


def end_process(code: int) -> NoReturn:
    """End as Python does, but leave all modules to the system, as children of multiprocessing do.

    Taking them apart takes a fork with torch two seconds of a processor. A file that is still open
    is not flushed by it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001 - Python has no public name for it
    end_at_once(code)


def die_with(parent: int) -> None:
    """End by SIGKILL when the parent ends; at once if it has ended already."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_at_once(code: int) -> NoReturn:
    """End without a wait for threads, and without what is registered with `atexit`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)
