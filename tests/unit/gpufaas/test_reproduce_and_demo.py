"""`gpufaas demo` and `gpufaas reproduce`: what they print and write."""

import sys
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from scheduler import policies
from scheduler.sim import calibrate, evaluation_beyond
from scheduler.sim.calibrate import CHOSEN
from scheduler.sim.evaluation_beyond import Family, Group
from scheduler.sim.study import Load

PNG = b"\x89PNG"

Output = pytest.CaptureFixture[str]


def test_demo_shows_every_policy_and_prints_the_picture_last(
    capsys: Output, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    path = tmp_path / "new" / "demo.png"

    assert main(["demo", "--out", str(path.parent)]) == 0

    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(" ")[0] for line in lines]
    assert all(shown.count(policy) == 2 for policy in policies.available())
    assert lines[-1] == str(path)
    assert path.read_bytes().startswith(PNG)


def test_demo_says_how_to_get_pictures_when_matplotlib_is_missing(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "scheduler.sim.pictures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main(["demo", "--out", str(tmp_path)]) == 0

    out, err = capsys.readouterr()
    assert "lalbo3" in out
    assert "gpufaas[report]" in err
    assert not list(tmp_path.iterdir())


def test_reproduce_refuses_before_it_simulates_when_matplotlib_is_missing(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "scheduler.sim.pictures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main(["reproduce", "--out", str(tmp_path)]) == EXIT_BAD_USE

    assert capsys.readouterr().err.count("\n") == 1


def test_reproduce_refuses_less_than_one_seed(capsys: Output) -> None:
    assert main(["reproduce", "--seeds", "0"]) == EXIT_BAD_USE

    assert "seeds must be at least 1, not 0" in capsys.readouterr().err


def test_reproduce_writes_the_document_and_all_its_pictures(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")
    few = (Family("One load", (Group("one", (Load(working_set=15, minutes=1),)),)),)
    monkeypatch.setattr(evaluation_beyond, "families", lambda: few)
    monkeypatch.setattr(calibrate, "around", lambda setting: ([setting], [setting]))
    monkeypatch.setattr(calibrate, "FINE_SEEDS", 1)

    assert main(["reproduce", "--seeds", "1", "--out", str(tmp_path)]) == 0

    text = (tmp_path / "evaluation.md").read_text(encoding="utf-8")
    linked = {line.split("(")[1][:-1] for line in text.splitlines() if line.startswith("![")}
    written = {f"pictures/{path.name}" for path in (tmp_path / "pictures").iterdir()}
    assert linked == written
    assert len(written) == 6
    assert str(CHOSEN) in text
    assert capsys.readouterr().out.startswith(str(tmp_path / "evaluation.md"))


def test_calibrate_prints_the_nearest_setting(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "coarse", lambda: [CHOSEN])
    monkeypatch.setattr(calibrate, "fine", lambda _: [CHOSEN])
    monkeypatch.setattr(calibrate, "COARSE_SEEDS", 1)
    monkeypatch.setattr(calibrate, "FINE_SEEDS", 1)

    assert main(["reproduce", "--calibrate"]) == 0

    out = capsys.readouterr().out
    assert f"Nearest: {CHOSEN}" in out
    assert "coarse grid" in out
    assert "fine grid" in out
