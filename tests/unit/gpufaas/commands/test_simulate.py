"""`gpufaas simulate`: its JSON, its explanations, and one clear line for every bad value."""

import json
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from scheduler import policies
from tests.kit.outcomes import outcome

KEYS = [
    "policy",
    "eviction",
    "working_set",
    "o3_limit",
    "seed",
    "requests",
    "avg_latency_s",
    "latency_variance",
    "p50_s",
    "p95_s",
    "p99_s",
    "miss_ratio",
    "false_miss_ratio",
    "duplicates",
    "gpu_busy_ratio",
    "makespan_s",
    "loaded_false_miss_ratio",
    "arriving_busy_ratio",
]
SMALL = ("--working-set", "8", "--gpus", "3", "--rate", "40", "--minutes", "2")

Output = pytest.CaptureFixture[str]


def simulate(*arguments: str) -> int:
    """The exit code, also where the parser itself refuses."""
    try:
        return main(["simulate", *SMALL, *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)


def complaint(capsys: Output) -> str:
    """The one line that a failed command prints."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_json_has_exactly_the_documented_keys(capsys: Output) -> None:
    assert simulate("--policy", "lalbo3", "--json") == 0

    (run,) = json.loads(capsys.readouterr().out)
    assert list(run) == KEYS
    assert (run["policy"], run["eviction"], run["working_set"]) == ("lalbo3", "lru", 8)
    assert (run["o3_limit"], run["seed"], run["requests"]) == (25, 1, 80)
    assert len(run["duplicates"]) == 8


def test_json_has_a_run_for_each_policy_and_seed(capsys: Output) -> None:
    assert simulate("--policy", "rr", "lb", "--seed", "5", "--seeds", "2", "--json") == 0

    runs = json.loads(capsys.readouterr().out)
    assert [(run["policy"], run["seed"]) for run in runs] == [
        ("rr", 5),
        ("rr", 6),
        ("lb", 5),
        ("lb", 6),
    ]
    assert runs[0]["o3_limit"] is None


def test_table_has_a_line_for_every_policy_when_all_are_asked_for(capsys: Output) -> None:
    assert simulate("--policy", "all") == 0

    first_words = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert set(policies.available()) <= set(first_words)


def test_trace_replays_the_carried_one(capsys: Output) -> None:
    assert simulate("--policy", "lb", "--trace", "azure", "--without-top", "1", "--json") == 0

    (run,) = json.loads(capsys.readouterr().out)
    assert 40 <= run["requests"] <= 80


@pytest.mark.parametrize("request_id", ["17", "r17"])
def test_explain_names_which_rule_and_candidates_decided(capsys: Output, request_id: str) -> None:
    assert simulate("--policy", "lalbo3", "--explain", request_id) == 0

    out = capsys.readouterr().out
    assert out.startswith("r17 -> gpu")
    for word in ("rule:", "waited", "passed over", "candidate", "load s", "<- chosen"):
        assert word in out


def test_explain_prints_an_array_when_json_is_asked_for(capsys: Output) -> None:
    assert simulate("--policy", "lalbo3", "--explain", "17", "--json") == 0

    explanations = json.loads(capsys.readouterr().out)
    assert {each["request"] for each in explanations} == {"r17"}


BAD_VALUES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--policy", "nope"), "unknown policy 'nope'; known: "),
    (("--policy", "gain overlap=0"), "'gain overlap=0' is no policy's name: `gpufaas policy set` "),
    (("--eviction", "nope"), "nope"),
    (("--profile", "none.csv"), "profile none.csv: No such file or directory\n"),
    (("--working-set", "0"), "a working set must have at least 1 function, not 0"),
    (("--gpus", "0"), "gpus must be at least 1, not 0"),
    (("--gpu-memory-mb", "100"), "gpu-memory-mb of 100 is too small"),
    (("--rate", "0"), "rate must be at least 1, not 0"),
    (("--minutes", "0"), "minutes must be at least 1, not 0"),
    (("--bunch-s", "61"), "bunch-s must be from 0 to 60 seconds, not 61"),
    (("--overhead-s", "-1"), "overhead-s must not be negative"),
    (("--policy", "lalbo3", "--o3-limit", "-1"), "must be 0 or more, not -1"),
    (("--seeds", "0"), "seeds must be at least 1, not 0"),
    (("--policy", "lb", "--explain", "9999"), "no request '9999'; there are r0 to r79"),
    (("--trace", "none.csv"), "none.csv: No such file or directory"),
    (("--trace", "azure", "--trace-start", "239"), "the trace has minutes 0 to 239"),
    (("--arrivals", "nope"), "there is no 'nope': "),
    (("--working-set", "many"), "invalid int value: 'many'"),
    (("--no-such-option",), "unrecognized arguments: --no-such-option"),
)


def test_bad_values_are_one_line_and_exit_code_2(capsys: Output) -> None:
    wrong = []
    for arguments, message in BAD_VALUES:
        code = outcome(simulate, *arguments)
        out, err = capsys.readouterr()
        one_line = out == "" and err.count("\n") == 1
        if code != EXIT_BAD_USE or not one_line or message not in err:
            wrong.append((arguments, code, out, err))

    assert wrong == []


def test_bad_trace_row_is_named_with_the_reason(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,1,2\no,a,g,http,1,many\n",
        encoding="utf-8",
    )

    assert simulate("--trace", str(path)) == EXIT_BAD_USE

    line = complaint(capsys)
    assert "row 3, minute column 2: 'many' is not a number of invocations" in line


def test_policies_are_named_with_commas_or_blanks(capsys: Output) -> None:
    few = ("--working-set", "3", "--gpus", "1", "--rate", "5", "--minutes", "1", "--json")
    shown = []
    for names in (("lb,lalbo3",), ("lb", "lalbo3"), ("lb,", "lalbo3")):
        assert simulate("--policy", *names, *few) == 0
        shown.append([row["policy"] for row in json.loads(capsys.readouterr().out)])
    assert shown == 3 * [["lb", "lalbo3"]]
