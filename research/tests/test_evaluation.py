"""Measuring, judging and writing the evaluation, on figures made up for it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from research.markdown import table
from research.thesis import calibrate, claims, experiments, printed_figures
from research.thesis.calibrate import CHOSEN, Distance, Point
from research.thesis.claims import Verdict
from research.thesis.experiments import Measured, PolicyFigures, Setting
from research.thesis.page import Evaluation, MeasuredVariant, by_claim, generated_parts, variants
from research.thesis.readings import Readings, ReadScenario
from scheduler.sim import study
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import Scenario, ScenarioResult, Traffic
from scheduler.sim.workload import Arrivals, Pattern

PAPER = printed_figures.load()
SOME = PolicyFigures(
    avg_latency_s=10.0,
    lowest_avg_s=9.0,
    highest_avg_s=11.0,
    latency_variance=4.0,
    p99_s=20.0,
    miss_ratio=0.2,
    false_miss_ratio=0.5,
    gpu_busy_ratio=0.4,
    copies=(3.0, 3.0, 3.0, 3.0, 3.0),
)


def alike(lalbo3: PolicyFigures = SOME) -> Measured:
    """Every policy the same but, perhaps, LALBO3 at working set 35."""
    figures = {(row.policy, row.working_set): SOME for row in PAPER.table2}
    figures["lalbo3", 35] = lalbo3
    return Measured(CHOSEN, figures, {row.o3_limit: SOME for row in PAPER.table3})


def in_use() -> list[MeasuredVariant]:
    """The setting in use alone."""
    return [MeasuredVariant(variants(CHOSEN)[0], alike())]


def as_the_thesis() -> Measured:
    """Tables 2 and 3 exactly; the claims as far as these hold them."""
    figures = {
        (row.policy, row.working_set): replace(SOME, copies=row.copies) for row in PAPER.table2
    }
    sweep = {
        row.o3_limit: replace(
            SOME,
            avg_latency_s=row.avg_latency_s,
            latency_variance=row.latency_variance,
            miss_ratio=row.miss_ratio,
            false_miss_ratio=row.false_miss_ratio,
        )
        for row in PAPER.table3
    }
    return Measured(CHOSEN, figures, sweep)


def test_distance_is_nothing_for_tables_that_agree() -> None:
    found = calibrate.distance(as_the_thesis(), PAPER)

    assert (found.table2, found.table3) == (0.0, 0.0)
    assert 0.0 < found.claims <= 1.0
    assert found.total == pytest.approx(found.claims / 3)


def test_distance_counts_an_error_as_one_at_most() -> None:
    measured = alike()
    sweep = {limit: replace(SOME, latency_variance=1e9) for limit in measured.sweep}
    found = calibrate.distance(replace(measured, sweep=sweep), PAPER)

    assert found.table3 <= 1.0


def test_best_puts_the_nearest_first() -> None:
    points = [Point(CHOSEN, Distance(x, x, x)) for x in (0.5, 0.1, 0.3)]

    assert [point.distance.total for point in calibrate.best(points, 2)] == pytest.approx(
        [0.1, 0.3]
    )


def test_best_puts_more_claims_before_less_distance() -> None:
    near = Point(CHOSEN, Distance(0.1, 0.1, 0.1), reproduced=12)
    right = Point(CHOSEN, Distance(0.5, 0.5, 0.5), reproduced=17)

    assert calibrate.best([near, right], 1) == [right]


def test_read_tries_every_combination_of_readings() -> None:
    readings = calibrate.all_readings()
    found = calibrate.read([Point(CHOSEN, Distance(0.1, 0.1, 0.1))], readings)

    assert len({setting.readings for setting in found}) == len(readings) == 2**7
    assert CHOSEN in found
    assert replace(CHOSEN, readings=Readings()) in found


def test_point_counts_the_claims_that_are_reproduced() -> None:
    measured = alike()
    verdicts = [judged.verdict for judged in claims.judge(measured, PAPER)]

    assert calibrate.point(measured, PAPER).reproduced == verdicts.count(Verdict.REPRODUCED) > 0


def test_coarse_has_no_setting_twice_and_fine_steps_around_the_best() -> None:
    grid = calibrate.coarse()
    steps = calibrate.fine([Point(CHOSEN, Distance(0.1, 0.1, 0.1))])

    assert len(set(grid)) == len(grid)
    assert CHOSEN in steps
    assert all(setting.pattern == CHOSEN.pattern for setting in steps)
    assert all(setting.overhead_s >= 0.0 for setting in steps)


def test_around_goes_through_the_chosen_setting_twice() -> None:
    by_arrivals, by_memory = calibrate.around(CHOSEN)

    assert CHOSEN in by_arrivals
    assert CHOSEN in by_memory
    assert {setting.gpu_memory_mb for setting in by_arrivals} == {CHOSEN.gpu_memory_mb}
    assert {setting.pattern for setting in by_memory} == {CHOSEN.pattern}


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (-50.0, Verdict.REPRODUCED),
        (-54.0, Verdict.REPRODUCED),
        (-30.0, Verdict.PARTLY),
        (-80.0, Verdict.PARTLY),
        (-20.0, Verdict.NOT),
        (-101.0, Verdict.NOT),
        (+5.0, Verdict.NOT),
    ],
)
def test_verdict_goes_by_the_share_of_the_effect(ours: float, verdict: Verdict) -> None:
    assert claims.verdict(ours, -50.0) is verdict


def test_minimum_is_met_only_by_enough() -> None:
    enough = claims.minimum(alike(replace(SOME, avg_latency_s=1.5, miss_ratio=0.05)))
    short = claims.minimum(alike(replace(SOME, avg_latency_s=1.6, miss_ratio=0.051)))

    assert [check.met for check in enough[:2]] == [True, True]
    assert [check.met for check in short[:2]] == [False, False]


def test_minimum_is_not_met_by_equal_policies() -> None:
    assert not any(check.met for check in claims.minimum(alike()))


def test_measure_averages_seeds_under_one_setting() -> None:
    few = replace(PAPER, table2=PAPER.table2[:1], table3=PAPER.table3[:1])
    setting = Setting(Pattern(Arrivals.POISSON), 7982, 0.1)
    (measured,) = experiments.measure([setting], few, seeds=2)

    assert set(measured.figures) == {("rr", 15)}
    assert set(measured.sweep) == {0}
    figures = measured.figures["rr", 15]
    assert figures.lowest_avg_s < figures.avg_latency_s < figures.highest_avg_s


def test_measure_does_equal_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(PAPER, table2=PAPER.table2[:1], table3=PAPER.table3[:1])
    ran: list[ReadScenario] = []

    def run_all(scenarios: Sequence[ReadScenario], _done: object) -> list[ScenarioResult]:
        ran.extend(scenarios)
        return [study.run(each) for each in scenarios]

    monkeypatch.setattr(study, "run_all", run_all)
    usual = Setting(Pattern(), 7982, 0.1)
    as_printed = replace(usual, readings=Readings(takes_first=True, held_when_loaded=True))
    experiments.measure([usual, as_printed], few, seeds=1)

    assert [(each.policy, each.readings) for each in ran] == [
        ("rr", Readings()),
        ("lalbo3", Readings()),
        ("lalbo3", Readings(takes_first=True)),
    ]


def test_average_counts_as_the_readings_say() -> None:
    load = Traffic(working_set=25, rate=200, minutes=2)
    results = [study.run(Scenario("rr", load=load, hardware=Hardware(overhead_s=2.0)))]
    usual = experiments.average(results)
    loaded = experiments.average(results, Readings(held_when_loaded=True))
    arriving = experiments.average(results, Readings(while_arriving=True))

    assert loaded.false_miss_ratio < usual.false_miss_ratio == arriving.false_miss_ratio
    assert arriving.gpu_busy_ratio != usual.gpu_busy_ratio == loaded.gpu_busy_ratio


def test_setting_reads_as_words() -> None:
    setting = Setting(Pattern(Arrivals.BUNCHED, 45.0), 7500, 0.25)

    assert str(setting) == "bunched, 45 s, 7500 MB, 0.25 s overhead"
    read = replace(setting, readings=Readings(spares_waiting=False, rro3_window=3))
    assert str(read).endswith("0.25 s overhead, plain LRU, RRO3 looking at 3")


def test_table_puts_text_left_and_figures_right() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_parts_have_every_figure_table_and_claim() -> None:
    point = Point(CHOSEN, Distance(0.1, 0.2, 0.3))
    found = generated_parts(Evaluation(PAPER, in_use(), 5, [point], [point], 5, "tables beyond"))

    assert {f"figure {number}" for number in range(5, 11)} < set(found)
    assert {"table 2", "table 3"} < set(found)
    assert "uniform, 7982 MB" in found["summary"]
    verdicts = [judged.verdict for judged in claims.judge(alike(), PAPER)]
    assert found["claims"].count("not |") == verdicts.count(Verdict.NOT)
    assert f"{verdicts.count(Verdict.NOT)} not." in found["summary"]
    assert found["beyond"] == "tables beyond"


def test_setting_lists_the_settings_that_are_as_near() -> None:
    near = [Point(CHOSEN, Distance(0.3, 0.3, 0.3), 17)]
    other = replace(CHOSEN, gpu_memory_mb=7000)
    far = [Point(other, Distance(0.2, 0.2, 0.2), 16)]
    found = generated_parts(Evaluation(PAPER, in_use(), 5, near, near + far, 3, ""))

    assert f"most claims (17), 1 of 2: {CHOSEN.quantities()}." in found["setting"]
    assert "**0.300, 17**" in found["setting"]


def test_readings_name_the_claims_that_each_one_gains_and_loses() -> None:
    better = replace(
        alike(), figures={**alike().figures, ("lb", 35): replace(SOME, avg_latency_s=5.6)}
    )
    (chosen, changed, *_) = variants(CHOSEN)
    found = by_claim([MeasuredVariant(chosen, alike()), MeasuredVariant(changed, better)], PAPER)
    number = 1 + [judged.ours for judged in claims.judge(better, PAPER)].index("-44 %")

    assert f"Gains {number}; loses none." in found
    assert "| **-44 %** |" in found


def test_variants_change_the_readings_alone_and_start_with_the_one_in_use() -> None:
    found = variants(CHOSEN)

    assert found[0].setting == CHOSEN
    assert len({variant.setting for variant in found}) == len(found)
    assert {replace(each.setting, readings=CHOSEN.readings) for each in found} == {CHOSEN}


def test_orders_want_only_lalbo3_to_lower_false_misses() -> None:
    lower = alike(replace(SOME, false_miss_ratio=0.45, gpu_busy_ratio=0.5))

    assert [check.met for check in claims.orders(lower)] == [True, True, True, True]
    assert [check.met for check in claims.orders(alike())] == [False, True, True, False]
