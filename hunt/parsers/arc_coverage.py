"""Which steps from line to line of ours a call takes: what tells a search that an input is new."""

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from tests.kit.places import ROOT

Arc = tuple[str, int, int]  # a file, and the lines of one step in it
_Steps = set[tuple[int, int]]


class ArcCoverage:
    """Steps in files below these folders of the checkout, over all calls that were watched."""

    def __init__(self, folders: Iterable[str]) -> None:
        self.count = 0
        self._roots = tuple(f"{ROOT / folder}/" for folder in folders)
        self._steps: dict[CodeType, _Steps | None] = {}

    def is_new(self, call: Callable[[], object]) -> bool:
        """Make a call, and return whether it took a step that none before took."""
        before = self.count
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)
        return self.count > before

    def arcs(self) -> set[Arc]:
        """Every step that was taken."""
        return {
            (code.co_filename, *step) for code, steps in self._steps.items() for step in steps or ()
        }

    def _enter(self, frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        try:
            steps = self._steps[code]
        except KeyError:
            steps = set() if code.co_filename.startswith(self._roots) else None
            self._steps[code] = steps
        return None if steps is None else self._tracer(steps)

    def _tracer(self, steps: _Steps) -> Callable[[FrameType, str, Any], Any]:
        last = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "line":
                step = last, frame.f_lineno
                last = frame.f_lineno
                if step not in steps:
                    steps.add(step)
                    self.count += 1
            return trace

        return trace
