"""Blocks of a function's memory that a worker maps, since the function's large inputs lie there."""

from typing import NamedTuple

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.device.worker_device import SharedArea
from gpu_manager.worker.shared_memory.result_files import Prepare
from torch_shim.wire.protocol import MOST_BLOCK_BYTES, MOST_BLOCKS, FailureKind


class FunctionBlock(NamedTuple):
    """One block: its bytes, which the function can write to at any time."""

    memory: memoryview
    prepared: SharedArea | None


class FunctionBlocks:
    """The blocks of one session, by the keys that the function gave them."""

    def __init__(self) -> None:
        self._blocks: dict[int, FunctionBlock] = {}

    def add(self, key: int, memory: memoryview, prepare: Prepare) -> None:
        """Take one more block; refused beyond what a function of ours shares."""
        taken_bytes = sum(len(block.memory) for block in self._blocks.values())
        if key <= 0 or key in self._blocks:
            raise CallRefused(FailureKind.BAD_FRAME, f"block {key}")
        if len(self._blocks) >= 2 * MOST_BLOCKS or taken_bytes + len(memory) > 2 * MOST_BLOCK_BYTES:
            detail = f"{len(self._blocks)} blocks of {taken_bytes} bytes are enough"
            raise CallRefused(FailureKind.BAD_FRAME, detail)
        self._blocks[key] = FunctionBlock(memory, prepare(memory))

    def get(self, key: int) -> FunctionBlock | None:
        """Return the block of this key."""
        return self._blocks.get(key)

    def drop(self, key: int) -> None:
        """Let a block go, if there is one of this key; its pages are the function's."""
        block = self._blocks.pop(key, None)
        if block is not None and block.prepared is not None:
            block.prepared.close()

    def clear(self) -> None:
        """Let all go."""
        for key in list(self._blocks):
            self.drop(key)
