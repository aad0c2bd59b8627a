"""A stand-in for NVIDIA's bindings of the driver: green contexts of a GPU's multiprocessors."""

# The names are the driver's own.
# ruff: noqa: N802, N803

from itertools import count
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 801


class FakeDriver:
    """One GPU, whose multiprocessors come in groups of `per_group`.

    As with the driver, the groups of one descriptor must come from one split.
    """

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, multiprocessors: int = 132, per_group: int = 8, refuses: str = "") -> None:
        self.multiprocessors = multiprocessors
        self.per_group = per_group
        self.refuses = refuses  # the name of a call
        self.splits = 0
        self.contexts: dict[int, list[Any]] = {}  # by the handle of their stream
        self._handles = count(1000)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        assert ordinal == 0  # a worker sees one GPU
        return self._answer("cuDeviceGet", 7)

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[int, Any]:
        assert (device, kind) == (7, 1)
        whole = SimpleNamespace(sm=SimpleNamespace(smCount=self.multiprocessors))
        return self._answer("cuDeviceGetDevResource", whole)

    def cuDevSmResourceSplitByCount(
        self, most: int, whole: Any, flags: int, minCount: int
    ) -> tuple[Any, ...]:
        assert (flags, minCount) == (0, 1)
        self.splits += 1
        made = min(most, whole.sm.smCount // self.per_group)
        groups = [self._group(number) for number in range(made)]
        rest = whole.sm.smCount - made * self.per_group
        return 0, groups, made, SimpleNamespace(sm=SimpleNamespace(smCount=rest))

    def cuDevResourceGenerateDesc(self, groups: list[Any], number: int) -> tuple[int, Any]:
        assert len(groups) == number
        assert len({group.split for group in groups}) == 1
        return self._answer("cuDevResourceGenerateDesc", groups)

    def cuGreenCtxCreate(self, described: Any, device: int, flags: int) -> tuple[int, Any]:
        assert (device, flags) == (7, 1)
        return self._answer("cuGreenCtxCreate", described)

    def cuGreenCtxStreamCreate(
        self, context: Any, flags: int, priority: int
    ) -> tuple[int, int | None]:
        assert (flags, priority) == (1, 0)
        handle = next(self._handles)
        self.contexts[handle] = [group.number for group in context]
        return self._answer("cuGreenCtxStreamCreate", handle)

    def _group(self, number: int) -> Any:
        sizes = SimpleNamespace(smCount=self.per_group)
        return SimpleNamespace(number=number, split=self.splits, sm=sizes)

    def _answer(self, call: str, found: Any) -> tuple[int, Any]:
        return (NOT_SUPPORTED, None) if self.refuses == call else (0, found)
