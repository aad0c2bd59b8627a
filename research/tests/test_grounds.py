"""The grounds of the policies: what is simulated there, and the page that says who is ahead."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from research import reproduce
from research.esg.fitted_profiles import EsgAssumptions
from research.esg.printed import esg_paper
from research.esg.workflow_run import calls_of
from research.grounds.loads import (
    CalmLatencies,
    EngineCase,
    FloodCase,
    FloodTraffic,
    Goal,
    Ground,
    GroundFigures,
    StageCase,
    ZipfTraffic,
    grounds,
)
from research.grounds.page import ground_blocks
from research.grounds.stage_engine import StageEngine
from research.grounds.study import GroundEvaluation, GroundPlan, evaluate_grounds
from scheduler import policies
from scheduler.composition import make_core
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import Traffic
from tests.kit.places import ROOT

PAGE = ROOT / "docs" / "evaluation" / "gain.md"
SMALL = Traffic(5, rate=30, minutes=1)
SERIAL = Hardware(gpus=6, load_takes=1.0)


@cache
def plan() -> GroundPlan:
    return GroundPlan(
        (
            Ground("small", (EngineCase("five", SMALL, SERIAL),), overlap=0),
            Ground("stages", (StageCase("strict", "strict-light", calls=6),)),
        ),
        ("lalbo3", "netgain", "gain"),
        (1, 2),
    )


@cache
def evaluation() -> GroundEvaluation:
    return evaluate_grounds(plan())


@pytest.mark.parametrize("policy", policies.available())
def test_every_call_of_the_workflows_ends_when_a_core_places_its_stages(policy: str) -> None:
    engine = StageEngine(make_core(policy), EsgAssumptions(), 1)
    engine.run(calls_of(esg_paper().level("relaxed-heavy"), 8, 1))
    assert len(engine.ended) == 8
    assert engine.cost == pytest.approx(sum(call.cost for call in engine.ended))
    assert all(call.ended_s > call.arrived_s for call in engine.ended)


def test_runs_take_longer_when_loads_beside_them_take_their_compute() -> None:
    average_s = {}
    for takes in (0.0, 1.0):
        hardware = Hardware(gpus=4, gpu_memory_mb=400, load_takes=takes)
        average_s[takes] = EngineCase("", ZipfTraffic(60), hardware).run("beside", {}, 1).average_s
    assert average_s[1.0] > 1.2 * average_s[0.0]


def test_only_the_calm_namespace_is_measured_when_another_one_floods() -> None:
    load = FloodTraffic(40)
    core = CalmLatencies(make_core("gain"))
    arrivals = load.build(1).arrivals
    Engine(core, Hardware(), load.build(1)).run()
    assert len(core.latencies) == sum(model.startswith("calm/") for _, model in arrivals)


def test_calm_namespace_waits_less_when_the_policy_has_turns() -> None:
    case = FloodCase("", FloodTraffic(600), SERIAL)
    figures = {lead_s: case.run("gain", {"lead_s": lead_s, "overlap": 0}, 1) for lead_s in (0, 8)}
    assert figures[8].average_s < 0.7 * figures[0].average_s


def test_loads_of_all_grounds_have_names_of_their_own() -> None:
    labels = [(ground.title, case.label) for ground in grounds() for case in ground.cases]
    assert len(set(labels)) == len(labels)


def test_figures_are_means_of_the_seeds_with_what_gain_is_told_of_the_hardware() -> None:
    (ground, _) = plan().grounds
    (case,) = ground.cases
    runs = [case.run("gain", {"overlap": 0}, seed) for seed in plan().seeds]
    found = evaluation().of(ground, case, "gain")
    assert found.average_s == pytest.approx(sum(run.average_s for run in runs) / 2)


def test_gain_is_compared_with_the_best_other_policy_in_each_goal() -> None:
    stages = StageCase("s", "strict-light")
    ground = Ground("g", (stages,))
    figures = {
        "gain": GroundFigures(1.0, 2.0, 0.0, in_time=0.9, cost=110.0),
        "lalbo3": GroundFigures(1.0, 2.0, 0.0, in_time=0.5, cost=100.0),
        "netgain": GroundFigures(1.0, 2.0, 0.0, in_time=0.95, cost=200.0),
    }
    found = GroundEvaluation(
        GroundPlan((ground,), tuple(figures), (1,)),
        {("g", "s", name): each for name, each in figures.items()},
    )
    in_time, cost = found.behind(ground)
    assert (in_time.goal, in_time.best, cost.goal, cost.best) == (
        Goal.IN_TIME,
        "netgain",
        Goal.COST,
        "lalbo3",
    )
    assert in_time.by == pytest.approx(0.05)
    assert in_time.by_base == pytest.approx(-0.4)
    assert cost.by == pytest.approx(0.1)
    conflicts = ground_blocks(found)["conflicts"]
    assert "`netgain` is +81.8 % in $ a million" in conflicts
    assert "`lalbo3` is +40.0 points in in time" in conflicts
    nowhere = replace(found, figures=dict.fromkeys(found.figures, figures["gain"]))
    assert "Nowhere" in ground_blocks(nowhere)["conflicts"]


def test_page_is_written_again_when_its_text_was_changed_by_hand(tmp_path: Path) -> None:
    page = reproduce.write_grounds(tmp_path, plan())
    page.write_text(page.read_text().replace("# Evaluation", "# By hand", 1))
    again = reproduce.write_grounds(tmp_path, plan()).read_text()
    assert again.startswith("# By hand")
    assert "### small" in again


def test_study_of_policies_is_refused_when_a_paper_is_named_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["reproduce", "--policies", "--paper", "esg"]) == EXIT_BAD_USE
    assert "--policies" in capsys.readouterr().err


def test_committed_page_has_every_ground_and_policy() -> None:
    text = PAGE.read_text(encoding="utf-8")
    generated = "".join(re.findall(r"<!-- begin \w+ -->\n(.*?)<!-- end", text, re.DOTALL))
    for ground in grounds():
        assert f"### {ground.title}" in generated
        assert all(f"| {case.label} |" in generated for case in ground.cases)
    assert all(f"`{name}`" in generated for name in policies.available())
