"""`gpufaas completion`: what a shell offers for the next word."""

import shlex
import shutil
import subprocess

import pytest

from gpufaas.cli import main


def offered(script: str, line: str) -> list[str]:
    """What bash offers at the end of this line."""
    words = ["gpufaas", *line.split(" ")]
    ask = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _gpufaas\n"
    program = f'{script}\n{ask}printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sta", ["status"]),
        ("policy ", ["get", "set", "list"]),
        ("policy g", ["get"]),
        ("policy list --lo", ["--long"]),
        ("policy set lb --j", ["--json"]),
        ("simulate --arrivals p", ["poisson"]),
        ("simulate --gpus 7 --arrivals b", ["bunched"]),
        ("up --config gpu", []),  # a file's name
        ("exec -- python up --", []),  # another program's
        ("completion ", ["bash", "zsh"]),
    ],
)
def test_word_is_completed_by_what_can_stand_there(
    script: str, line: str, expected: list[str]
) -> None:
    found = offered(script, line)
    assert [word for word in found if not word.startswith("--") or "--" in line] == expected


def test_options_are_those_of_the_command_and_of_its_verb(script: str) -> None:
    assert {"--devices", "--examples", "--port"} <= set(offered(script, "up --"))
    assert "--port" not in offered(script, "down --")
    assert "--long" in offered(script, "policy list --")
    assert "--long" not in offered(script, "policy get --")


def test_zsh_has_the_same_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert "bashcompinit\n" in script
    if shutil.which("zsh"):  # with none of the user's settings
        done = subprocess.run(
            ["zsh", "-f", "-c", f"{script}\nwhich _gpufaas"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "COMPREPLY" in done.stdout
        assert "command not found" not in done.stderr
