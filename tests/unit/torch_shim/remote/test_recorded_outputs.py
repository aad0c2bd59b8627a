"""The places of a recorded call's outputs are read only where they can be such."""

import pytest
import torch

from torch_shim.errors import BadFrame
from torch_shim.remote.recorded_calls import output_in
from torch_shim.remote.values import read_view
from torch_shim.wire.messages import STAYS, OutputPart, SentOutput
from torch_shim.wire.protocol import NOTES_BYTES

ARENA_BYTES = 4096


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "size_bytes"),
    [
        ([1 << 50], [0], 0, 64),  # to copy it would take all memory
        ([3, 4], [2, 1], 0, 40),  # it overlaps itself
        ([4], [1], STAYS, 16),
        ([4], [1], -1, 16),
        ([4], [1], ARENA_BYTES - NOTES_BYTES - 8, 16),  # where the notes are
        ([4], [1], 1 << 40, 16),
    ],
)
def test_output_that_cannot_be_there_is_refused(
    shape: list[int], strides: list[int], offset: int, size_bytes: int
) -> None:
    view = read_view(SentOutput(0, "float32", shape, strides, 0), "an output:")
    with pytest.raises(BadFrame, match="a recorded output"):
        output_in(bytearray(ARENA_BYTES), view, [OutputPart(offset, size_bytes, False)])


def test_output_lies_over_its_place_in_the_arena() -> None:
    arena = bytearray(ARENA_BYTES)
    view = read_view(SentOutput(0, "float32", [2, 2], [1, 2], 1), "an output:")
    output = output_in(arena, view, [OutputPart(64, 20, False)])
    arena[68:84] = torch.arange(4.0).numpy().tobytes()
    assert output.tolist() == [[0.0, 2.0], [1.0, 3.0]]
