"""`gpufaas replay --policy`: what it takes, and what it prints."""

import json
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.output.policy_comparison import chosen_policies
from scheduler import policies
from tests.kit.places import ROOT

RECORDINGS = ROOT / "tests" / "recordings"
EVERY, LIVE = RECORDINGS / "every-policy.jsonl", RECORDINGS / "live.jsonl"


def row(text: str, name: str) -> list[str]:
    """The cells of one row of the table."""
    (line,) = [line for line in text.splitlines() if line.startswith(name + "  ")]
    return line.removeprefix(name).replace(" ms", "ms").replace(" s", "s").split()


def test_replay_prints_what_happened_its_simulation_and_other_policies_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["replay", str(EVERY), "--policy", "lalbo3", "lb", "--parameters", "o3_limit=3"]) == 0
    )
    answer = capsys.readouterr().out
    head = answer.splitlines()[0].split()
    assert head == ["happened", "recorded", "again", "lalbo3", "lb"]
    for name in ("requests", "hit ratio", "false misses", "evictions", "on another GPU"):
        assert len(row(answer, name)) == 4, name
    for name in ("average latency", "median", "95th percentile", "99th percentile"):
        assert len(row(answer, name)) == 4, name
    assert row(answer, "requests") == ["72"] * 4
    assert row(answer, "on another GPU")[0] == "0"
    good, bad = (float(cell) for cell in row(answer, "hit ratio")[2:])
    assert good > bad + 0.3
    assert "lalbo3: o3_limit=3" in answer
    assert "Assumed:" in answer
    assert "% off in average latency" in answer
    assert "changed 6 times" in answer


def test_replay_reports_it_when_callers_did_not_wait_for_their_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", str(LIVE), "--policy", "rr"]) == 0
    assert "Callers do not wait for their models" in capsys.readouterr().out


def test_replay_prints_the_recording_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(EVERY), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["by_kind"].values()) == found["events"] > 0
    assert found["differing_lines"] == []


def test_replay_prints_all_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(EVERY), "--json", "--policy", "all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in found["others"]] == list(policies.available())
    assert found["happened"]["requests"] == found["others"][0]["figures"]["requests"] == 72
    assert found["recorded"]["figures"]["p99_s"] > 0
    assert any("hold" in each for each in found["assumptions"])


def test_policies_are_named_in_any_way_and_take_only_their_own_parameters() -> None:
    assert chosen_policies(["lb,rr", "lb"], None) == [("lb", {}), ("rr", {})]
    chosen = dict(chosen_policies(["all"], "o3_limit=7"))
    assert chosen["lalbo3"] == {"o3_limit": 7}
    assert chosen["lb"] == {}


def test_missing_recording_is_named_as_other_commands_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", "nofile"]) == EXIT_BAD_USE
    assert capsys.readouterr().err == "gpufaas replay: nofile: No such file or directory\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", "lb", "--parameters", "o3_limit=3"], "it has no such parameter"),
        (["--policy", "lalbo3", "--parameters", "o3_limit=many"], "o3_limit=many"),
        (["--policy", "lalbo3", "--parameters", "o3_limit=-1"], "o3_limit"),
        (["--parameters", "o3_limit=3"], "name it with --policy"),
        (["--policy", "", "--parameters", "a=1"], "which policy?"),
    ],
)
def test_bad_use_is_reported_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(EVERY), *words]) == EXIT_BAD_USE
    error = capsys.readouterr().err
    assert error.startswith("gpufaas replay: ")
    assert says in error
    assert error.count("\n") == 1


def test_file_is_named_when_it_is_no_recording_that_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = LIVE.read_text(encoding="utf-8").splitlines(keepends=True)
    for text, says in (
        ("hello\n", "line 1: no line of a recording"),
        ("".join(lines[:4] + lines[5:]), "this version decides otherwise"),
        ("", "the recording is empty"),
    ):
        path = tmp_path / "run.jsonl"
        path.write_text(text, encoding="utf-8")
        assert main(["replay", str(path), "--policy", "lb"]) == EXIT_BAD_USE
        error = capsys.readouterr().err
        assert error.count(str(path)) == 1
        assert says in error
