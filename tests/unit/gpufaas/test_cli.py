"""The command line itself: help, version, and what a slip of the finger gets."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from gpufaas.cli import COMMANDS, EXIT_BAD_USE, main, make_parser
from gpufaas.options.help_texts import HELP_TEXTS
from gpufaas.options.shared import cluster_secret
from tests.kit.network.answering import answering_each


def ended(words: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def test_help_is_shown_when_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "usage: gpufaas" in said
    assert "status" in said


def test_version_is_the_releases_and_the_commits(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gpufaas ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["staus"], "gpufaas: there is no 'staus': did you mean 'status'?\n"),
        (["frobnicate"], "gpufaas: there is no 'frobnicate': --help lists what there is\n"),
        (["policy", "lst"], "gpufaas policy: there is no 'lst': did you mean 'list'?\n"),
        (["policy", "x"], "gpufaas policy: there is no 'x': get, set, list\n"),
        (
            ["bill", "--by", "functon"],
            "gpufaas bill: argument --by: there is no 'functon': did you mean 'function'?\n",
        ),
    ],
)
def test_slip_of_the_finger_gets_the_nearest_word(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(words) == EXIT_BAD_USE
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_that_can_be_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended([name, "--help"]) == 0
    said = capsys.readouterr().out
    examples = HELP_TEXTS[name].examples
    assert len(examples) >= 2
    for example in examples:
        assert f"\n  gpufaas {example}\n" in said
        words = shlex.split(example.partition(" > ")[0].partition(" >> ")[0])
        assert make_parser(words).parse_args(words).command == name


@pytest.mark.parametrize("words", ["status", "policy", "policy get", "top", "models"])
def test_help_says_which_stack_is_asked(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([*words.split(), "--help"]) == 0
    assert "GPUFAAS_STATE" in capsys.readouterr().out.rpartition("options:")[2]


@pytest.mark.parametrize("words", ["quota", "quota list"])
def test_quota_knows_the_words_of_policy(words: str, tmp_path: Path) -> None:
    with answering_each({"/quotas": {"owners": []}}) as url:
        assert main([*words.split(), *_options(url, tmp_path)]) == 0


def test_policies_are_a_line_each_with_the_one_in_force_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def policy(name: str, **parameters: float) -> dict[str, Any]:
        rule = f"The rule of {name},\nwhich is long."
        summary = f"{name.upper()}: what {name} does."
        return {"name": name, "summary": summary, "rule": rule, "parameters": parameters}

    answers = {
        "/policies": [policy("gain", overlap=0.5), policy("lb")],
        "/policy": {"policy": "lb", "parameters": {}},
    }
    shown = ["lb", "  what lb does.", "", "  The rule of lb,", "  which is long."]
    with answering_each(answers) as url:
        for words, expected in (
            (
                "list",
                [
                    "   POLICY  RULE             PARAMETERS",
                    "   gain    what gain does.  overlap=0.5",
                    "*  lb      what lb does.",
                ],
            ),
            ("get", ["lb"]),
            ("get lb", shown),
        ):
            assert main(["policy", *words.split(), *_options(url, tmp_path)]) == 0
            assert capsys.readouterr().out.splitlines() == expected
        assert main(["policy", "list", "--long", *_options(url, tmp_path)]) == 0
        assert "The rule of gain" in capsys.readouterr().out
        assert main(["policy", "get", "guess", *_options(url, tmp_path)]) == EXIT_BAD_USE
        assert "`gpufaas policy list` has all" in capsys.readouterr().err


def _options(url: str, folder: Path) -> list[str]:
    cluster_secret(str(folder / "secret"), {}, make=True)
    return ["--scheduler", url, "--secret-file", str(folder / "secret")]
