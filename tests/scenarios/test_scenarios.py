"""Every scenario beside this file plays as written; `pytest --rewrite` writes what plays today."""

from pathlib import Path

import pytest

from tests.scenarios.runner import commands_of, play

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_plays_as_written(scenario: Path, pytestconfig: pytest.Config) -> None:
    today = play(commands_of(scenario))
    if pytestconfig.getoption("--rewrite"):
        scenario.write_text(today, encoding="utf-8")
    assert scenario.read_text(encoding="utf-8") == today


def test_scenario_fails_when_an_answer_is_wrong() -> None:
    commands = commands_of(SCENARIOS[0])
    assert play(commands) != play(commands[:-1])
    assert play(commands) != "\n".join(commands) + "\n"
