"""What is remembered of models that broke their processes, and for how long."""

import json
from pathlib import Path

import pytest

from gpu_manager.runtimes.stream import BREAKS_FILE, ProcessBreaks

DAY_S = 24 * 3600.0


def test_counts_outlive_the_manager_when_they_have_a_file(tmp_path: Path) -> None:
    first = ProcessBreaks(tmp_path / BREAKS_FILE)
    first.add("team/a")
    first.add("team/a")
    first.add("team/b")
    again = ProcessBreaks(tmp_path / BREAKS_FILE)
    assert [again[name] for name in ("team/a", "team/b", "team/c")] == [2, 1, 0]
    assert [path.name for path in tmp_path.iterdir()] == [BREAKS_FILE]


def test_counts_end_with_the_manager_when_they_have_no_file() -> None:
    breaks = ProcessBreaks()
    breaks.add("team/a")
    assert (breaks["team/a"], ProcessBreaks()["team/a"]) == (1, 0)


def test_managers_that_share_a_file_keep_each_others_counts(tmp_path: Path) -> None:
    one, two = ProcessBreaks(tmp_path / BREAKS_FILE), ProcessBreaks(tmp_path / BREAKS_FILE)
    one.add("team/a")
    two.add("team/b")
    two.add("team/a")
    third = ProcessBreaks(tmp_path / BREAKS_FILE)
    assert (third["team/a"], third["team/b"]) == (2, 1)


def test_a_model_is_forgotten_when_it_broke_nothing_for_a_day(tmp_path: Path) -> None:
    now_s = 1e9
    breaks = ProcessBreaks(tmp_path / BREAKS_FILE, lambda: now_s)
    breaks.add("team/a")
    breaks.add("team/a")
    now_s += DAY_S - 1
    assert breaks["team/a"] == 2
    now_s += 2
    assert breaks["team/a"] == 0
    assert ProcessBreaks(tmp_path / BREAKS_FILE, lambda: now_s)["team/a"] == 0
    breaks.add("team/a")
    assert breaks["team/a"] == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{", json.dumps({"a": [1]}), json.dumps({"a": [-1, 0.0]}), "\xff"]
)
def test_a_file_that_is_not_ours_counts_as_none_and_is_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / BREAKS_FILE).write_text(content, encoding="latin-1")
    breaks = ProcessBreaks(tmp_path / BREAKS_FILE)
    assert breaks["a"] == 0
    assert BREAKS_FILE in caplog.text
    breaks.add("a")
    assert ProcessBreaks(tmp_path / BREAKS_FILE)["a"] == 1


def test_counting_goes_on_when_the_folder_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    breaks = ProcessBreaks(tmp_path / "gone" / BREAKS_FILE)
    breaks.add("team/a")
    assert breaks["team/a"] == 1
    assert "forgotten with this manager" in caplog.text
