"""`gpufaas reproduce --paper esg`: its page, its pictures, and the page that is committed."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from research import reproduce
from research.esg import page
from research.esg.experiments import (
    ESG,
    ESG_STEPS,
    INFLESS,
    OURS,
    STRICT,
    SYSTEMS,
    EsgEvaluation,
    EsgPlan,
    default_esg_plan,
    esg_readings,
    evaluate_esg,
)
from research.esg.fitted_profiles import EsgAssumptions, GpuScaling
from research.esg.headlines import judged_esg, verdict_of
from research.esg.page import esg_blocks, pair_outcome
from research.esg.printed import esg_paper
from research.esg.workflow_figures import WorkflowFigures
from tests.kit.places import ROOT

pytestmark = pytest.mark.group("reproduce", seconds=110)

PAGE = ROOT / "docs" / "evaluation" / "esg.md"
PLAN = EsgPlan(
    assumed=EsgAssumptions(),
    scalings=tuple(GpuScaling),
    calls=12,
    seeds=1,
    pair_seeds=2,
    variants={"as chosen": EsgAssumptions()},
    variant_seeds=1,
    loads=(1.0,),
    searched=6,
)


@cache
def evaluation() -> EsgEvaluation:
    steps: list[str] = []
    found = evaluate_esg(PLAN, steps.append)
    assert len(steps) == ESG_STEPS
    return found


@cache
def blocks() -> dict[str, str]:
    return dict(esg_blocks(evaluation()))


def committed(name: str) -> str:
    """A generated part of the committed page."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", text, re.DOTALL)
    assert found is not None
    return found[1]


def figures(hits: tuple[float, ...], costs: tuple[float, ...]) -> WorkflowFigures:
    return replace(evaluation().main[GpuScaling.PORTIONS][STRICT][ESG], hits=hits, costs=costs)


def test_write_makes_the_page_and_all_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    monkeypatch.setattr(reproduce, "evaluate_esg", lambda _plan, _announce: evaluation())

    path = reproduce.write_esg(tmp_path, PLAN)

    text = path.read_text(encoding="utf-8")
    linked = {line.split("(")[1][:-1] for line in text.splitlines() if line.startswith("![")}
    assert path == tmp_path / "evaluation" / "esg.md"
    assert linked == {f"../pictures/{each.name}" for each in (tmp_path / "pictures").iterdir()}
    assert len(linked) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("headlines", [each.text for each in esg_paper().headlines]),
        ("figure 6", [level.name for level in esg_paper().levels]),
        ("figure 7", [each.name for each in esg_paper().applications]),
        ("profiles", list(esg_paper().table3)),
        ("readings", list(esg_readings())),
        ("sensitivity", ["as chosen"]),
    ],
)
def test_blocks_have_a_row_for_everything_that_was_simulated(
    name: str, expected: list[str]
) -> None:
    first_cells = {line.split(" | ")[0].removeprefix("| ") for line in blocks()[name].splitlines()}

    assert not set(expected) - first_cells


@pytest.mark.parametrize("name", ["figure 6", "figure 7", "figure 8", "table 4", "loads"])
def test_blocks_show_both_scalings(name: str) -> None:
    assert all(f"Scaling: {scaling}." in blocks()[name] for scaling in GpuScaling)


def test_figure_6_has_each_system_in_each_setting() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| ([\w-]+) \|", blocks()["figure 6"], re.MULTILINE)

    expected = [(level.name, name) for level in esg_paper().levels for name in SYSTEMS]
    assert [
        row for row in rows if row[0] in {level.name for level in esg_paper().levels}
    ] == expected * len(GpuScaling)


def test_headlines_are_computed_from_the_runs() -> None:
    strict = evaluation().main[GpuScaling.PORTIONS][STRICT]
    found = {each.printed.key: each for each in judged_esg(evaluation(), GpuScaling.PORTIONS)}

    behind = [strict[ESG].hit - strict[name].hit for name in (INFLESS, "FaST-GShare")]
    assert found["hit enumerating most"].ours == pytest.approx(100.0 * max(behind))
    assert found["miss Orion strict-light"].ours == 100.0 * strict["Orion"].missed
    assert found["cost most"].ours >= 100.0 * (strict[INFLESS].cost / strict[ESG].cost - 1.0)
    assert len(found) == len(esg_paper().headlines)


def test_limit_is_reproduced_when_ours_is_below_it() -> None:
    (limit,) = (
        each
        for each in judged_esg(evaluation(), GpuScaling.PORTIONS)
        if each.printed.key == "search"
    )

    assert verdict_of(replace(limit, ours=0.1)) == "reproduced"
    assert verdict_of(replace(limit, ours=100.0)) == "not"


def test_pair_counts_seeds_that_are_ahead_in_one_figure_and_behind_in_none() -> None:
    esg = figures((0.9, 0.9, 0.9, 0.9), (100.0, 100.0, 100.0, 100.0))
    ours = figures((1.0, 0.9, 0.9, 0.8), (100.0, 90.0, 100.0, 90.0))

    outcome = pair_outcome({ESG: esg, OURS: ours})

    assert (outcome.seeds, outcome.ahead, outcome.behind) == (4, 2, 0)
    assert outcome.hit_points == pytest.approx(0.0)
    assert outcome.worst_hit_points == pytest.approx(-10.0)
    assert outcome.worst_cost == pytest.approx(1.0)
    assert not pair_outcome({ESG: esg, OURS: esg}).wins
    assert not pair_outcome({ESG: ours, OURS: esg}).wins


def test_committed_page_has_every_part_of_the_plan() -> None:
    plan = default_esg_plan()
    text = PAGE.read_text(encoding="utf-8")

    assert set(blocks()) == set(re.findall(r"<!-- begin (.*?) -->", text))
    assert all(f"| {label} |" in committed("sensitivity") for label in plan.variants)
    assert all(f"| {label} |" in committed("readings") for label in esg_readings())
    assert all(f"| × {factor:g} |" in committed("loads") for factor in plan.loads)
    assert committed("pair").count(f"of {plan.pair_seeds} |") == 6
    assert plan.pair_seeds == 20


def test_committed_page_has_the_profiles_that_the_code_makes() -> None:
    plan = default_esg_plan()

    assert committed("profiles") == page.profile_table(
        {scaling: plan.of(scaling) for scaling in GpuScaling}
    )


def test_committed_page_says_that_our_rule_is_ahead_in_every_setting() -> None:
    """What README says of it."""
    assert committed("summary").count("behind in none in 3 of 3 settings") == len(GpuScaling)


def test_thesis_options_are_refused_for_esg(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--paper", "esg", "--seeds", "2"]) == EXIT_BAD_USE
    assert "thesis" in capsys.readouterr().err
