"""Runs inside a watched part: writes every few seconds what its memory consists of.

Only the standard library is imported until a detail is wanted: this comes before anything else of
the process. At the end garbage in cycles and free memory of malloc are given back in turn, so that
the rest is what lives.
"""

import ctypes
import gc
import json
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

END = "end"
_POLL_S = 0.2
_MOST_TYPES, _MOST_DETAILS = 60, 400
_DETAILS_EVERY = 4  # samples: to take them stops the process for a while
_KIB = 1024


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns, summed over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def watch_if_chosen(folder: str, parts: Sequence[str], every_s: float, detail: str) -> None:
    """Begin to watch this process, if it is one of these parts of gpufaas."""
    words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "gpufaas" not in words:
        return
    part = words[words.index("gpufaas") + 1]
    if part in parts:
        watcher = HeapWatch(part, Path(folder), every_s, detail)
        threading.Thread(target=watcher.watch, name="heap-watch", daemon=True).start()


class HeapWatch:
    """Appends a sample to a file of this process, every so often and at the end.

    For the detail `lines` Python notes which line allocated what, which costs time and memory
    itself, and says nothing of compiled code; for `holders` it is seen what refers to what.
    """

    def __init__(self, part: str, folder: Path, every_s: float, detail: str) -> None:
        self._path = folder / f"{part}-{os.getpid()}.jsonl"
        self._end = folder / END
        self._every_s = every_s
        self._detail = _DETAILS[detail]
        self._began_s = time.monotonic()
        self._libc = ctypes.CDLL(None)
        self._libc.mallinfo2.restype = _Mallinfo
        if detail == "lines":
            tracemalloc.start()

    def watch(self) -> None:
        """Sample until the file `end` is there, and then once after each step of giving back."""
        number = 0
        while not self._is_over():
            self._write("", detailed=number % _DETAILS_EVERY == 0)
            number += 1
        self._write("before giving back", detailed=True)
        garbage = _garbage()
        when = f"after a collection of {garbage.total()} objects"
        self._write(when, garbage=dict(garbage.most_common(_MOST_TYPES)))
        self._libc.malloc_trim(0)
        self._write("after malloc_trim")
        self._end.with_name(f"{self._path.name}.{END}").touch()

    def _is_over(self) -> bool:
        until_s = time.monotonic() + self._every_s
        while time.monotonic() < until_s:
            if self._end.exists():
                return True
            time.sleep(_POLL_S)
        return False

    def _write(self, when: str, *, detailed: bool = False, **more: object) -> None:
        sample = self.sample() | more
        sample["when"] = when
        if detailed and self._detail is not None:
            sample["details"] = dict(self._detail().most_common(_MOST_DETAILS))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample) + "\n")

    def sample(self) -> dict[str, Any]:
        """What there is now; objects of before the start are frozen, and not among the types."""
        info = self._libc.mallinfo2()
        tracked = gc.get_objects()
        types = _types(tracked)
        return {
            "at_s": time.monotonic() - self._began_s,
            "private_bytes": _private_bytes(),
            "malloc_used_bytes": info.uordblks + info.hblkhd,
            "malloc_free_bytes": info.fordblks,
            "python_blocks": sys.getallocatedblocks(),
            "objects": len(tracked),
            "collections": [each["collections"] for each in gc.get_stats()],
            "types": dict(types.most_common(_MOST_TYPES)),
        }


def _garbage() -> "Counter[str]":
    """Collect what is in cycles that nobody holds; of what types it was."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = _types(gc.garbage)
    gc.garbage.clear()
    gc.collect()
    return found


def _types(objects: Sequence[object]) -> "Counter[str]":
    return Counter(map(type_name, objects))


def type_name(one: object) -> str:
    """The name of its type, with the module."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _lines() -> "Counter[str]":
    """The bytes that each line has allocated and nobody has freed."""
    found = tracemalloc.take_snapshot().statistics("lineno")
    return Counter(
        {f"{each.traceback[0].filename}:{each.traceback[0].lineno}": each.size for each in found}
    )


def _holders() -> "Counter[str]":
    from hunt.soak.attribution.held_objects import held_bytes  # noqa: PLC0415 - see above

    return held_bytes()


def _private_bytes() -> int:
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(row.split()[1]) * _KIB for row in rows if row.startswith("Private_"))


_DETAILS: dict[str, Callable[[], "Counter[str]"] | None] = {
    "": None,
    "lines": _lines,
    "holders": _holders,
}
