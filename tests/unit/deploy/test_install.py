"""What deploy/install.py tells uv of pip's settings, and when pip goes on alone."""

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from deploy import install


def test_the_environment_counts_more_than_files_and_a_command_more_than_all() -> None:
    listed = """\
global.index-url='https://one.example/simple'
:env:.index-url='https://two.example/simple'
global.cert='/etc/all.pem'
install.cert='/etc/install.pem'
download.no-index='true'
"""
    assert install.pip_settings(listed) == {
        "index-url": "https://two.example/simple",
        "cert": "/etc/install.pem",
    }


def test_uv_has_the_indexes_and_folders_of_pip() -> None:
    settings = {
        "index-url": "https://one.example/simple",
        "extra-index-url": "https://two.example/simple https://three.example/simple",
        "find-links": "/opt/wheels",
        "trusted-host": "one.example",
        "no-index": "true",
        "timeout": "180",
    }
    assert " ".join(install.uv_options(settings)) == (
        "--default-index https://one.example/simple"
        " --extra-index-url https://two.example/simple"
        " --extra-index-url https://three.example/simple"
        " --find-links /opt/wheels --allow-insecure-host one.example --no-index"
    )


class Commands:
    """Stands for `subprocess.run`: commands with one of these words fail."""

    def __init__(self, *failing: str) -> None:
        self._failing = failing
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        text = " ".join(command)
        self.ran.append(text)
        failed = any(word in text for word in self._failing)
        return subprocess.CompletedProcess(command, int(failed), stdout="")

    def tools(self) -> list[str]:
        """What installed: uv or pip, and what."""
        return [
            f"{'uv' if ' -m uv ' in text else 'pip'} {text.split()[-1]}"
            for text in self.ran
            if " install " in text
        ]


def test_pip_installs_where_it_cannot_bring_uv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands("constraints.txt uv")
    monkeypatch.setattr(subprocess, "run", commands)
    install.install(["report"], "")
    assert commands.tools() == ["pip uv", "pip hatchling", "pip .[report]"]
    assert "by pip:\n  matplotlib" in capsys.readouterr().out


def test_pip_goes_on_where_uv_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands("--editable")
    monkeypatch.setattr(subprocess, "run", commands)
    with pytest.raises(SystemExit):
        install.install(["report"], "")
    assert commands.tools() == ["pip uv", "uv hatchling", "uv .[report]", "pip .[report]"]
    assert "now pip tries" in capsys.readouterr().out


def test_torch_comes_from_the_index_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands()
    monkeypatch.setattr(subprocess, "run", commands)
    monkeypatch.setattr(install, "_FIRST_PROGRAMS", {})
    install.install(["gpu"], "https://wheels.example/cpu")
    assert "--extra-index-url https://wheels.example/cpu" in commands.ran[-1]
    out = capsys.readouterr().out
    assert "torch as https://wheels.example/cpu has it" in out
    assert "CUDA" not in out
