"""`gpufaas reproduce`: what it prints and writes."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.output.optional_pictures import STYLE
from research import reproduce
from research.reproduce import ReproductionPlan
from research.thesis import printed_figures
from research.thesis.beyond import LoadFamily, LoadGroup
from research.thesis.calibrate import CHOSEN
from research.thesis.page import variants
from research.thesis.printed_figures import USUAL_LIMIT
from research.thesis.readings import Readings
from scheduler.sim import study
from scheduler.sim.study import Scenario, ScenarioResult, Traffic
from tests.kit.places import ROOT

pytestmark = pytest.mark.group("reproduce", seconds=110)

PNG = b"\x89PNG"

Output = pytest.CaptureFixture[str]

_RESULTS: dict[Scenario, ScenarioResult] = {}


@pytest.fixture(autouse=True)
def simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scenario that several of these tests simulate is simulated by the first of them."""
    run_all = study.run_all

    def shared(
        scenarios: Sequence[Scenario], done: Callable[[int, int], None] | None = None
    ) -> list[ScenarioResult]:
        fresh = [scenario for scenario in scenarios if scenario not in _RESULTS]
        _RESULTS.update(zip(fresh, run_all(fresh, done), strict=True))
        return [_RESULTS[scenario] for scenario in scenarios]

    monkeypatch.setattr(study, "run_all", shared)


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (STYLE, "research.pictures", "research.thesis.chapter_pictures"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_reproduce_refuses_before_it_simulates_when_matplotlib_is_missing(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)

    assert main(["reproduce", "--out", str(tmp_path)]) == EXIT_BAD_USE

    assert capsys.readouterr().err.count("\n") == 1


def test_reproduce_refuses_before_it_simulates_when_out_is_a_file(
    capsys: Output, tmp_path: Path
) -> None:
    path = tmp_path / "taken"
    path.write_text("", encoding="utf-8")

    assert main(["reproduce", "--out", str(path)]) == EXIT_BAD_USE

    assert f"cannot write to {path}: File exists" in capsys.readouterr().err


def test_reproduce_refuses_less_than_one_seed(capsys: Output) -> None:
    assert main(["reproduce", "--seeds", "0"]) == EXIT_BAD_USE

    assert "seeds must be at least 1, not 0" in capsys.readouterr().err


def test_write_makes_the_document_and_all_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    load = Traffic(working_set=15, minutes=1)
    family = LoadFamily("One load", (LoadGroup("one", (load,)),))
    plan = ReproductionPlan(1, [CHOSEN], [CHOSEN], 1, [family], variants(CHOSEN)[:2])

    path = reproduce.write(tmp_path, plan)

    text = path.read_text(encoding="utf-8")
    linked = {line.split("(")[1][:-1] for line in text.splitlines() if line.startswith("![")}
    written = {f"pictures/{path.name}" for path in (tmp_path / "pictures").iterdir()}
    assert linked == written
    assert len(written) == 6
    assert CHOSEN.quantities() in text
    assert "- **spared**: " in text
    assert "### One load" in text


def test_write_keeps_the_text_around_generated_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    family = LoadFamily("One load", (LoadGroup("one", (Traffic(working_set=15, minutes=1),)),))
    path = tmp_path / "evaluation.md"
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    path.write_text(page, encoding="utf-8")

    plan = ReproductionPlan(1, [CHOSEN], [CHOSEN], 1, [family], variants(CHOSEN)[:2])
    reproduce.write(tmp_path, plan)

    text = path.read_text(encoding="utf-8")
    assert "Mean of 1 seeds" in text
    assert by_hand(text) == by_hand(page)


def by_hand(page: str) -> str:
    """The page without its generated parts."""
    return re.sub(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", "", page, flags=re.DOTALL)


def test_search_prints_every_round_and_returns_the_best(capsys: Output) -> None:
    whole = printed_figures.load()
    part = replace(
        whole,
        claims=tuple(claim for claim in whole.claims if claim.working_sets == (15,)),
        sm_utilisation={"rr": 7.48, "lb": 7.51},
        table2=whole.table2[:5],
        table3=(whole.limit(0), whole.limit(USUAL_LIMIT)),
    )

    readings = [Readings(), CHOSEN.readings]
    found = reproduce.search(part, [CHOSEN], readings, seeds=(1, 1, 1, 1))

    out = capsys.readouterr().out
    assert "1 settings, coarse grid, 1 seeds" in out
    assert "fine grid" in out
    assert "5 settings, last round" in out
    assert "2 settings, readings" in out
    assert str(found) in out
