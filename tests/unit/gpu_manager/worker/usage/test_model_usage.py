"""The 13 metrics of a model: rates over its runs, and reports that become rare."""

import pytest

from gpu_manager.worker.program.usage import ModelUsage, OperatorCounts
from scheduler.api import METRICS


def counts() -> OperatorCounts:
    """Ten operators that read 300 bytes, 100 of them with too much for a cache, and write 100."""
    found = OperatorCounts()
    found.operators, found.arithmetic = 10, 1000
    found.read_bytes, found.written_bytes, found.far_bytes = 300, 100, 100
    return found


def runs(usage: ModelUsage, number: int, wall_s: float = 0.5) -> None:
    """So many runs, half of whose time the process computed."""
    for _ in range(number):
        usage.ran(usage.begin(), counts(), (wall_s / 2, wall_s), (50, 25))


def test_metrics_are_rates_over_the_time_of_the_runs() -> None:
    usage = ModelUsage(emulated=False)
    runs(usage, 4)
    found = dict(zip(METRICS, usage.news(2000, 1000), strict=True))
    assert found == {
        "gpu_utilization": 0.5,
        "sm_efficiency": 0.0,  # of a GPU, nothing here measures these two
        "warp_efficiency": 0.0,
        "ipc": 2000.0,
        "occupancy": 20.0,
        "memory_used_max": 2000.0,
        "memory_used_average": 1000.0,
        "memory_utilization": 0.25,
        "device_to_host": 50.0,
        "host_to_device": 100.0,
        "global_load": 600.0,
        "global_store": 200.0,
        "execution_time": 0.5,
    }


def test_processor_stands_for_multiprocessors_on_an_emulated_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = ModelUsage(emulated=True)
    assert usage.begin()[0] > 0.0
    monkeypatch.setattr(
        usage, "begin", lambda: (7.0, 3.0)
    )  # other threads of this process compute too
    for _ in range(4):
        usage.ran((7.0 - 0.006, 3.0 - 0.002), counts(), (0.01, 0.01), (0, 0))
    found = dict(zip(METRICS, usage.news(1, 1), strict=True))
    assert 0.0 < found["sm_efficiency"] <= 1.0
    assert found["warp_efficiency"] == pytest.approx(0.75)
    assert found["ipc"] == pytest.approx(1000 / 0.008)


def test_reports_become_rare_and_come_only_with_news() -> None:
    usage = ModelUsage(emulated=False)
    runs(usage, 3)
    assert usage.news(1, 1) == []
    runs(usage, 1)
    assert usage.news(1, 1) != []
    assert usage.news(1, 1) == []
    runs(usage, 12)
    assert usage.news(1, 1) == []  # 16 runs, and nothing has changed
    runs(usage, 48)
    assert usage.news(2, 1) != []  # 64, and the peak is another


def test_run_whose_operators_were_not_counted_is_left_out() -> None:
    usage = ModelUsage(emulated=False)
    for _ in range(100):
        usage.ran(usage.begin(), None, (1.0, 1.0), (1, 1))
        usage.ran(usage.begin(), OperatorCounts(), (1.0, 1.0), (1, 1))
    assert usage.news(1, 1) == []
