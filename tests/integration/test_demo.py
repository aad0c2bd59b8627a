"""`gpufaas demo`: what it prints and draws."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.output.optional_pictures import STYLE
from scheduler import policies
from scheduler.sim import study
from scheduler.sim.study import Scenario, ScenarioResult

pytestmark = pytest.mark.group("demo", seconds=60)

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


def test_demo_shows_its_policies_and_prints_the_picture_last(
    capsys: Output, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    path = tmp_path / "new" / "demo.png"

    assert main(["demo", "--out", str(path.parent)]) == 0

    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(" ")[0] for line in lines]
    assert [word for word in shown if word in policies.available()] == [
        *("rr", "lb", "rro3", "lalb", "lalbo3"),
        *("netgain", "gain"),
    ]
    assert lines[-1] == str(path)
    assert path.read_bytes().startswith(PNG)


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, STYLE, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_demo_explains_how_to_get_pictures_when_matplotlib_is_missing(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)

    assert main(["demo", "--out", str(tmp_path)]) == 0

    out, err = capsys.readouterr()
    assert "lalbo3" in out
    assert "[report]" in err
    assert not list(tmp_path.iterdir())


def test_demo_refuses_before_it_simulates_when_out_is_a_file(
    capsys: Output, tmp_path: Path
) -> None:
    path = tmp_path / "taken"
    path.write_text("", encoding="utf-8")

    assert main(["demo", "--out", str(path)]) == EXIT_BAD_USE

    assert f"cannot write to {path}: File exists" in capsys.readouterr().err
