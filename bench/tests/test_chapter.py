"""The functions and times with which chapter 5 runs through the whole stack."""

import pytest

from bench.chapter.chapter_functions import (
    GPU_MEMORY_BYTES,
    SMALLER,
    deployments,
    emulated_line,
)
from bench.chapter.chapter_runs import chapter_load
from cache_manager.model.ids import MIB
from scheduler.sim import workload
from scheduler.sim.model_catalogue import table1
from scheduler.sim.workload import Pattern

_ROW_BYTES = 256


def test_line_goes_through_the_loads_of_table_1() -> None:
    line = emulated_line()
    apart_s = [line.of(model).load_s - model.load_s for model in table1().values()]

    assert sum(apart_s) == pytest.approx(0.0, abs=1e-9)
    assert sum(each * each for each in apart_s) < sum((each + 0.05) ** 2 for each in apart_s)
    assert line.of(table1()["vgg19"]).run_s == pytest.approx(1.3127, abs=1e-4)


def test_options_scale_times_and_memory_alike() -> None:
    line, speed = emulated_line(), 4.0
    words = dict(zip(*[iter(line.options(speed))] * 2, strict=True))
    fixed_s, _, per_gib = words["--emulate-load"].partition("+")
    gib = table1()["vgg19"].memory_bytes / SMALLER / (1024 * MIB)
    load_s = float(fixed_s) + float(per_gib.removesuffix("/GiB")) * gib

    assert load_s == pytest.approx(line.of(table1()["vgg19"]).load_s / speed, abs=1e-4)
    assert float(words["--emulate-run"]) == pytest.approx(line.run_s / speed, abs=1e-5)


def test_functions_hold_weights_of_the_table_scaled() -> None:
    load = chapter_load(35, 1, 1, emulated_line())
    found = deployments(load.models)
    variables = [deployment["envVars"] for deployment in found]
    rows = [int(each["ROWS"]) for each in variables if isinstance(each, dict)]

    assert len({str(deployment["service"]) for deployment in found}) == len(rows) == 35
    for model, number in zip(load.models, rows, strict=True):
        assert 0 <= model.memory_bytes // SMALLER - number * _ROW_BYTES < _ROW_BYTES
    assert 2 * rows[0] * _ROW_BYTES <= GPU_MEMORY_BYTES < 3 * rows[0] * _ROW_BYTES


def test_load_has_the_requests_of_the_simulated_chapter() -> None:
    assert (
        chapter_load(25, 2, 3, emulated_line()).arrivals
        == workload.thesis(25, 325, 2, Pattern(), 3).arrivals
    )
