"""What workers in memory do with the data of functions."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence

from gpu_manager.worker.orders import (
    DataBorrowed,
    DataGivenBack,
    DataLent,
    DataPut,
    GrantData,
    GrantLeft,
    HandedOver,
    HandOver,
    LendData,
    RecallGrant,
    WithdrawData,
    WorkerOrder,
)
from tests.kit.nodes.in_memory_runtime import InMemoryHosted


class InMemoryData:
    """The data of one model's worker, which answers a moment later unless it hangs."""

    def __init__(self, hosted: InMemoryHosted) -> None:
        self.hosted = hosted
        self.content: dict[str, bytes] = {}  # that functions put here, by handle
        self.lent: Counter[str] = Counter()  # what is lent of it, and not given back
        self.granted = 0, 0  # bytes and pieces
        self.unsaid: list[DataPut] = []
        self.answers: list[DataBorrowed] = []  # in their order
        hosted.carry_out.append(self.carry_out)
        hosted.say.append(self._say_puts)

    def carry_out(self, order: WorkerOrder, descriptors: Sequence[int]) -> None:
        match order:
            case HandOver(handle=handle, size_bytes=size_bytes):
                self.hand_over(handle, size_bytes, descriptors[0])
            case WithdrawData(handle=handle):
                self.content.pop(handle, None)
            case GrantData(size_bytes=size_bytes, pieces=pieces):
                self.granted = self.granted[0] + size_bytes, self.granted[1] + pieces
            case RecallGrant():
                self._recall()
            case LendData(handle=handle):
                self._lend(handle)
            case DataGivenBack(handle=handle):
                self.lent[handle] -= 1
            case DataBorrowed():
                self.answers.append(order)
            case _:
                raise AssertionError(f"{order} is none about data")

    def hand_over(self, handle: str, size_bytes: int, descriptor: int) -> None:
        content = self.content.get(handle)
        done = content is not None and len(content) == size_bytes
        if content is not None and done:
            os.pwrite(descriptor, content, 0)
        self._report_soon(HandedOver(self.hosted.number, handle, done))

    def lend(self, handle: str, size_bytes: int, token: bytes = b"token") -> None:
        """Say that data is lent, whoever asked for it."""
        self.lent[handle] = 1
        self.hosted.report(DataLent(self.hosted.number, handle, True, size_bytes, 0, token))

    def _recall(self) -> None:
        if not self.hosted.hangs:
            left, self.granted = self.granted, (0, 0)
            asyncio.get_running_loop().call_soon(self._say_left, left)

    def _say_left(self, left: tuple[int, int]) -> None:
        self._say_puts()
        self.hosted.report(GrantLeft(self.hosted.number, *left))

    def _say_puts(self) -> None:
        """What it has put and not said yet is said now."""
        while self.unsaid:
            self.hosted.report(self.unsaid.pop(0))

    def _lend(self, handle: str) -> None:
        """A worker that has the data lends it by a name of the driver's."""
        content, number = self.content.get(handle), self.hosted.number
        if not self.hosted.hangs:
            self.lent[handle] += content is not None
        if content is None:
            self._report_soon(DataLent(number, handle, False, 0, 0, b""))
        else:
            self._report_soon(DataLent(number, handle, True, len(content), 0, b"token"))

    def _report_soon(self, report: WorkerOrder) -> None:
        if not self.hosted.hangs:
            asyncio.get_running_loop().call_soon(self.hosted.report, report)
