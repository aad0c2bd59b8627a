"""Notes of a process under the shim for `gpufaas check`, by the program's lines."""

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import torch_shim
from torch_shim import errors, process_report
from torch_shim.advice import CodePlace
from torch_shim.tensors import handles

Place = tuple[str, int]


# The replaced functions. This module has a name within the shim, so Dynamo skips the replacements.
_operator = vars(handles.CudaTensor)["__torch_function__"].__func__
_local_call = process_report.ProcessReport.local_call
_refuse = errors.UnsupportedCall.__init__


def install(path: str) -> None:
    """Start to take notes; the sums are appended to a file when the process ends."""
    files = [str(package.__file__) for package in (torch, torch_shim)]
    notes = Notes(path, [f"{Path(file).parent}{os.sep}" for file in files])
    for owner, name, value in (
        (handles.CudaTensor, "__torch_function__", classmethod(notes.operator())),
        (process_report.ProcessReport, "local_call", notes.local_call()),
        (errors.UnsupportedCall, "__init__", notes.refusal()),
    ):
        setattr(owner, name, value)


class Notes:
    """Sums of this process by the program's line."""

    def __init__(self, path: str, skipped_files: Sequence[str]) -> None:
        self._path = path
        # Prefixes of file names that are not the program's; "<" is generated code.
        self._skipped_files = ("<", __file__, *skipped_files)
        self._inside = threading.local()
        self.clear()
        os.register_at_fork(after_in_child=self.clear)
        atexit.register(self.write)
        # A child of multiprocessing ends without atexit.
        util.register_after_fork(self, lambda it: util.Finalize(None, it.write, exitpriority=0))

    def clear(self) -> None:
        """Drop all sums, as a forked child must."""
        self._lock = threading.Lock()
        self.operators: dict[tuple[str, int, str], list[float]] = {}
        self.local: Counter[tuple[str, int, str]] = Counter()
        self.refused: dict[tuple[str, int, str, str], None] = {}

    def operator(self) -> Callable[..., Any]:
        """`__torch_function__`, timed at its outermost call."""

        def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(self._inside, "operator", False):
                return _operator(cls, func, types, args, kwargs)
            self._inside.operator = True
            start_s = time.perf_counter()
            try:
                return _operator(cls, func, types, args, kwargs)
            finally:
                took_s = time.perf_counter() - start_s
                name = _name(func, args)
                self._inside.operator = False
                key = (*self._place(), name)
                with self._lock:
                    sums = self.operators.setdefault(key, [0, 0.0, took_s])
                    sums[0] += 1
                    sums[1] += took_s
                    sums[2] = min(sums[2], took_s)

        return run

    def local_call(self) -> Callable[..., Any]:
        """`ProcessReport.local_call`, with the program's line noted."""

        def noted(
            report: Any, reason: str, operators: int, what: str = "", place: CodePlace | None = None
        ) -> None:
            with self._lock:
                self.local[*(place or self._place()), reason] += operators
            _local_call(report, reason, operators, what, place)

        return noted

    def refusal(self) -> Callable[..., Any]:
        """`UnsupportedCall.__init__`, with the line noted; programs may catch the error."""

        def noted(error: Any, call: str, remedy: str) -> None:
            with self._lock:
                self.refused.setdefault((*self._place(), call, remedy))
            _refuse(error, call, remedy)

        return noted

    def write(self) -> None:
        """Append the sums as a line to the file, which other processes share."""
        notes = {
            "operators": [[*key, *sums] for key, sums in self.operators.items()],
            "local": [[*key, operators] for key, operators in self.local.items()],
            "refused": list(self.refused),
        }
        if any(notes.values()):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, (json.dumps(notes) + "\n").encode())
            finally:
                os.close(descriptor)

    def _place(self) -> Place:
        """The innermost line outside of the shim and of PyTorch."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way to it
        place = ("", 0)
        while frame is not None:
            place = frame.f_code.co_filename, frame.f_lineno
            if not place[0].startswith(self._skipped_files):
                return place
            frame = frame.f_back
        return place


def _name(func: Any, args: Sequence[Any]) -> str:
    """The operator's name, which says whether a tensor of it is sparse."""
    name: str = getattr(func, "__name__", str(func))
    is_sparse = any(isinstance(a, torch.Tensor) and "sparse" in str(a.layout) for a in args)
    return f"sparse {name}" if is_sparse and "sparse" not in name else name
