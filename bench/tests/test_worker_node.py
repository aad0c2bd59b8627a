"""When workers that wait for a model are at rest, and what of a load is no wait."""

import pytest

from bench.gpu.parts.profile import load_seconds
from bench.measure.worker_node import SparesLook
from gpu_manager.runtimes.runtime import LoadSpan


@pytest.mark.parametrize(
    ("taken_bytes", "computed_s", "is_quiet"),
    [
        ({7: 500}, 1.0, True),
        ({7: 500}, 1.05, True),  # CUDA's own threads look around
        ({7: 500}, 1.2, False),
        ({7: 600}, 1.0, False),
        ({8: 500}, 1.0, False),
        ({7: None}, 1.0, False),
        ({}, 1.0, False),
    ],
)
def test_workers_rest_when_they_neither_compute_nor_take_memory(
    taken_bytes: dict[int, int | None], computed_s: float, *, is_quiet: bool
) -> None:
    before = SparesLook({7: 500}, 1.0)
    assert SparesLook(taken_bytes, computed_s).is_quiet_since(before) is is_quiet


def test_load_is_from_first_to_last_phase_without_waits_for_worker_and_context() -> None:
    spans = (
        LoadSpan("room", 0.0, 1.0),
        LoadSpan("worker", 1.0, 3.0),
        LoadSpan("context", 3.0, 6.0),
        LoadSpan("read", 5.0, 8.0),
        LoadSpan("transfer", 6.5, 8.5),  # beside the reading
    )
    assert load_seconds(spans) == 3.5
