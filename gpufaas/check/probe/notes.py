"""What a check asks of a process under the shim: lines of the user's own, and what ran at them."""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torch_shim import errors, report, tensors

Place = tuple[str, int]


# What is replaced. Being named in a module of the shim's, it stays among what Dynamo passes over.
_operator = vars(tensors.CudaTensor)["__torch_function__"].__func__
_local_call = report.Report.local_call
_refuse = errors.Unsupported.__init__


def install(path: str) -> None:
    """Note from now on; the sums are appended to a file when the process ends."""
    files = [str(package.__file__) for package in (torch, tensors)]
    notes = Notes(path, [f"{Path(file).parent}{os.sep}" for file in files])
    for owner, name, value in (
        (tensors.CudaTensor, "__torch_function__", classmethod(notes.operator())),
        (report.Report, "local_call", notes.local_call()),
        (errors.Unsupported, "__init__", notes.refusal()),
    ):
        setattr(owner, name, value)


class Notes:
    """Sums of this process, by the line of the program that it is about."""

    def __init__(self, path: str, not_theirs: Sequence[str]) -> None:
        self._path = path
        # How the names of files begin that nobody asks about; "<" is generated code.
        self._not_theirs = ("<", __file__, *not_theirs)
        self._inside = threading.local()
        self.clear()
        os.register_at_fork(after_in_child=self.clear)
        atexit.register(self.write)
        # A child of multiprocessing leaves without atexit.
        util.register_after_fork(self, lambda it: util.Finalize(None, it.write, exitpriority=0))

    def clear(self) -> None:
        """Start from nothing, as a forked child does."""
        self._lock = threading.Lock()
        self.operators: dict[tuple[str, int, str], list[float]] = {}
        self.local: dict[tuple[str, int, str], list[int]] = {}
        self.refused: dict[tuple[str, int, str, str], int] = {}

    def operator(self) -> Callable[..., Any]:
        """`__torch_function__` with its time taken, as long as it runs outside of any other."""

        def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(self._inside, "it", False):
                return _operator(cls, func, types, args, kwargs)
            self._inside.it = True
            start_s = time.perf_counter()
            try:
                return _operator(cls, func, types, args, kwargs)
            finally:
                took_s = time.perf_counter() - start_s
                self._inside.it = False
                key = (*self._place(), getattr(func, "__name__", str(func)))
                with self._lock:
                    sums = self.operators.setdefault(key, [0, 0.0, took_s])
                    sums[0] += 1
                    sums[1] += took_s
                    sums[2] = min(sums[2], took_s)

        return run

    def local_call(self) -> Callable[..., Any]:
        """`Report.local_call` with its line."""

        def noted(report: Any, reason: str, operators: int, *rest: str) -> None:
            with self._lock:
                sums = self.local.setdefault((*self._place(), reason), [0, 0])
                sums[0] += 1
                sums[1] += operators
            _local_call(report, reason, operators, *rest)

        return noted

    def refusal(self) -> Callable[..., Any]:
        """`Unsupported.__init__` with its line: the program may catch the error."""

        def noted(error: Any, call: str, remedy: str) -> None:
            with self._lock:
                key = (*self._place(), call, remedy)
                self.refused[key] = self.refused.get(key, 0) + 1
            _refuse(error, call, remedy)

        return noted

    def write(self) -> None:
        """Append a line to a file that other processes append to as well."""
        notes = {
            "operators": [[*key, *sums] for key, sums in self.operators.items()],
            "local": [[*key, *sums] for key, sums in self.local.items()],
            "refused": [list(key) for key in self.refused],
        }
        if any(notes.values()):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, (json.dumps(notes) + "\n").encode())
            finally:
                os.close(descriptor)

    def _place(self) -> Place:
        """The innermost line that is neither the shim's nor PyTorch's."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way to it
        place = ("", 0)
        while frame is not None:
            place = frame.f_code.co_filename, frame.f_lineno
            if not place[0].startswith(self._not_theirs):
                return place
            frame = frame.f_back
        return place
