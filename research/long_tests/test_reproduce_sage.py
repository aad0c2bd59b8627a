"""`gpufaas reproduce --paper sage`: its page, its pictures, and the page that is committed."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from research import reproduce
from research.sage import page
from research.sage.experiments import (
    SAGE_STEPS,
    SageEvaluation,
    SagePlan,
    default_sage_plan,
    evaluate,
)
from research.sage.gpu_systems import FIXED_GSL, SAGE
from research.sage.headlines import judged_headlines
from research.sage.idle_walk import TraceWindow
from research.sage.page import sage_blocks
from research.sage.printed_numbers import sage_paper
from research.sage.system_study import CHOSEN, peaks
from tests.kit.places import ROOT

pytestmark = pytest.mark.group("reproduce", seconds=110)

DOCS = ROOT / "docs"
PAGE = DOCS / "evaluation" / "sage.md"
WINDOW = TraceWindow(0, 10, 0, 50)
SHORT = replace(CHOSEN, minutes=2)
PLAN = SagePlan(
    setting=SHORT,
    loads=(SHORT.load,),
    contentions=(SHORT.assumed.contention,),
    variants={"as chosen": SHORT},
    windows=[WINDOW],
    regular_windows=[replace(WINDOW, regular=True)],
    fixed_s=(10.0, 30.0, 60.0),
    worths=(50.0, 200.0),
)


@cache
def evaluation() -> SageEvaluation:
    steps: list[str] = []
    found = evaluate(PLAN, steps.append)
    assert len(steps) == SAGE_STEPS
    return found


@pytest.fixture(autouse=True)
def simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `reproduce` writes here, it would simulate again for each of these tests."""

    def once(plan: SagePlan, done: object) -> SageEvaluation:
        del done
        assert plan is PLAN
        return evaluation()

    monkeypatch.setattr(reproduce, "evaluate", once)


def block(name: str) -> str:
    """A generated part of the committed page."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_write_makes_the_page_and_all_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")

    path = reproduce.write_sage(tmp_path, PLAN)

    text = path.read_text(encoding="utf-8")
    linked = {line.split("(")[1][:-1] for line in text.splitlines() if line.startswith("![")}
    assert path == tmp_path / "evaluation" / "sage.md"
    assert linked == {f"../pictures/{each.name}" for each in (tmp_path / "pictures").iterdir()}
    assert len(linked) == 3


def test_write_keeps_the_text_around_generated_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    path = tmp_path / "evaluation" / "sage.md"
    path.parent.mkdir()
    page = PAGE.read_text(encoding="utf-8")
    path.write_text(page, encoding="utf-8")

    reproduce.write_sage(tmp_path, PLAN)

    text = path.read_text(encoding="utf-8")
    assert by_hand(text) == by_hand(page)
    assert "2 minutes of the trace" in text


def by_hand(page: str) -> str:
    """The page without its generated parts."""
    return re.sub(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["thirty", "latency", "headlines", "exits", "sensitivity"])
def test_blocks_have_a_row_for_everything_that_was_simulated(name: str) -> None:
    text = sage_blocks(evaluation())[name]
    expected = {
        "thirty": ["FixedGSL", "DGSF, 2 contexts", "SAGE"],
        "latency": [row.name for row in sage_paper().table2],
        "headlines": [each.text for each in sage_paper().headlines],
        "exits": ["1", "all", "the worst", "`adaptive`"],
        "sensitivity": ["as chosen"],
    }[name]

    first_cells = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()]
    assert not set(expected) - set(first_cells)


def test_every_headline_is_judged_by_its_distance() -> None:
    judged = judged_headlines(evaluation())

    assert [each.printed for each in judged] == list(sage_paper().headlines)
    assert all(each.ours > 0.0 for each in judged)
    reproduced = {each.printed.key for each in judged if each.verdict == "reproduced"}
    assert {"stages mean", "stages least", "parallel setup"} <= reproduced


def test_the_committed_page_has_the_tables_that_the_code_makes() -> None:
    found = evaluation()
    at_peak = {system.name: peaks(system, CHOSEN.assumed) for system in (FIXED_GSL, SAGE)}

    assert block("table 4") == page.table4(found)
    assert block("functions") == page.functions(found)
    assert block("peak") == page.at_peak(replace(found, peaks=at_peak))
    assert "exact in all six columns" in block("summary")


def test_the_committed_page_has_every_part_of_the_plan() -> None:
    plan = default_sage_plan()

    assert all(f"| {label} |" in block("sensitivity") for label in plan.variants)
    loads = [line.split(" | ")[0] for line in block("setting").split("\n\n")[0].splitlines()]
    assert loads[2:] == [f"| {load:g}" for load in plan.loads]
    assert len(plan.windows) == 10
    assert re.findall(r"^\| (\d+) \|", block("exits"), re.MULTILINE) == [
        str(number) for number in range(1, 11)
    ]
    assert {f"{name}" for name in sage_blocks(evaluation())} <= set(
        re.findall(r"<!-- begin (.*?) -->", PAGE.read_text(encoding="utf-8"))
    )


def test_the_chosen_setting_is_the_nearest_of_the_committed_grid() -> None:
    head, _, *rows = block("setting").split("\n\n")[0].splitlines()
    contentions = head.split(" | ")[1:]
    nearest = [
        (cells[0].removeprefix("| "), contentions[place].removesuffix(" |"))
        for cells in (row.split(" | ") for row in rows)
        for place, cell in enumerate(cells[1:])
        if "**" in cell
    ]

    assert nearest == [(f"{CHOSEN.load:g}", f"{CHOSEN.assumed.contention:g}")]


def test_the_committed_page_has_adaptive_a_fifth_better_than_fixed_in_the_worst_window() -> None:
    (worst,) = re.findall(r"^\| the worst \|(.*)\|$", block("exits"), re.MULTILINE)
    cold, memory, *_ = (int(cell) for cell in re.findall(r"([+-]\d+) %", worst))

    assert cold <= -20
    assert memory <= -20


@pytest.mark.parametrize("option", [["--seeds", "3"], ["--calibrate"]])
def test_sage_refuses_options_of_the_thesis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: list[str]
) -> None:
    assert main(["reproduce", "--paper", "sage", "--out", str(tmp_path), *option]) == EXIT_BAD_USE

    assert "thesis" in capsys.readouterr().err
