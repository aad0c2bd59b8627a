"""Workloads that are drawn, and their jobs in pairs on GPUs."""

from pathlib import Path

import pytest

from research.interference.experiments import DrawnSetting, InterferencePlan, draw, run_in_pairs
from research.interference.pair_choice import PairedJob, in_order
from research.interference.printed import additive, interference_paper
from research.reproduce import write_interference


def doubled(_one: PairedJob, _other: PairedJob) -> float:
    return 2.0


def test_next_pair_begins_when_both_of_one_have_ended() -> None:
    jobs = [PairedJob("a", 10.0, 1.0), PairedJob("b", 2.0, 1.0), PairedJob("c", 1.0, 1.0)]

    found = run_in_pairs(jobs, in_order, doubled, gpus=1, gpu_bytes=2.0)

    assert found.makespan_s == pytest.approx(12.0 + 1.0)  # b ends at 4, a has 8 s left by then
    assert found.pairs == 1
    assert found.mean_slowdown == pytest.approx((1.2 + 2.0 + 1.0) / 3)


def test_jobs_run_one_by_one_where_memory_is_short_and_on_all_gpus() -> None:
    jobs = [PairedJob(name, 10.0, 2.0) for name in "abcd"]
    assert run_in_pairs(jobs, in_order, doubled, gpus=1, gpu_bytes=2.0).makespan_s == 40.0
    assert run_in_pairs(jobs, in_order, doubled, gpus=2, gpu_bytes=2.0).makespan_s == 20.0
    assert run_in_pairs(jobs, in_order, doubled, gpus=2, gpu_bytes=4.0).makespan_s == 20.0


def test_printed_table_is_the_sum_of_two_parts() -> None:
    paper = interference_paper()
    assert len(paper.table) == 21
    assert additive(paper).largest_error < 0.002


def test_drawn_workload_keeps_what_is_printed() -> None:
    paper = interference_paper()
    drawn = draw(paper, DrawnSetting(2, 1, 5.0, 0.0), seed=3)

    assert len(drawn.jobs) == 18
    seconds = [job.seconds for job in drawn.jobs]
    assert max(seconds) <= 5.0 * 100.0
    assert min(seconds) >= 100.0
    for pair, value in {**paper.table, **paper.further_pairs}.items():
        assert drawn.predicted[pair] == drawn.happens[pair] == value
    peaks = {job.name.partition("/")[0]: job.peak_bytes for job in drawn.jobs}
    fits = {pair: sum(peaks[name] for name in pair) <= paper.gpu_gb for pair in paper.table}
    assert all(fits[pair] for pair in paper.table if pair[0] != pair[1])
    assert not any(sum(peaks[name] for name in pair) <= paper.gpu_gb for pair in paper.too_large)


def test_same_seed_draws_the_same_workload() -> None:
    paper = interference_paper()
    setting = DrawnSetting(1, 1, 2.0, 0.4)
    assert draw(paper, setting, 1) == draw(paper, setting, 1)
    assert draw(paper, setting, 1) != draw(paper, setting, 2)


def test_page_is_written_from_a_small_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = InterferencePlan([DrawnSetting(1, 1, 2.0, 0.0), DrawnSetting(1, 2, 5.0, 0.4)], seeds=3)

    page = write_interference(tmp_path, plan).read_text()

    assert "| cnn | +0.000 | 1.250 |" in page
    assert page.count(" of 3 |") == 2
    assert "of 6 drawn workloads" in page
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in told] == ["simulating 1 of 2", "simulating 2 of 2"]
