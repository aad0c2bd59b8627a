"""What a round sees of the logs of a world that has lived through many."""

from pathlib import Path

from hunt.campaign.worlds.new_text import NewText


def test_text_is_what_was_added_since_the_last_look_and_all_of_it_when_begun_anew(
    tmp_path: Path,
) -> None:
    log, new = tmp_path / "log", NewText()
    assert new.of(log) == ""
    log.write_text("one\n")
    assert new.of(log) == "one\n"
    with log.open("a") as more:
        more.write("two\n")
    assert (new.of(log), new.of(log)) == ("two\n", "")
    log.write_text("new\n")
    assert new.of(log) == "new\n"


def test_traceback_is_found_once(tmp_path: Path) -> None:
    log, new = tmp_path / "log", NewText()
    log.write_text("Traceback (most recent call last):\n")
    assert new.tracebacks([log, tmp_path / "none"]) == [f"a traceback in {log}"]
    assert new.tracebacks([log]) == []
