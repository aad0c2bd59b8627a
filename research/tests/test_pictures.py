"""Pictures come out as files, the same bytes for the same figures."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extra `report`")

from gpufaas.output.bar_pictures import Bars, draw_side_by_side
from research.pictures import Curve, draw_bars, draw_curves

PNG = b"\x89PNG"
BARS = Bars(
    "A title",
    "seconds",
    ["15", "25"],
    {"rr": [3.0, 30.0], "lalb": [1.0, 2.0]},
    {"lalb": [None, 2.5]},
    logarithmic=True,
)


def test_bars_are_the_same_bytes_when_drawn_again(tmp_path: Path) -> None:
    first, again = tmp_path / "new" / "a.png", tmp_path / "b.png"
    draw_bars(first, BARS)
    draw_bars(again, BARS)

    assert first.read_bytes().startswith(PNG)
    assert first.read_bytes() == again.read_bytes()


def test_curves_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    draw_curves(path, "A title", [0, 5], [Curve("s", [2.0, 1.0], [2.1, 1.1])])

    assert path.read_bytes().startswith(PNG)


def test_panels_are_drawn_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "panels.png"
    draw_side_by_side(path, "A title", [BARS, BARS])

    assert path.read_bytes().startswith(PNG)
