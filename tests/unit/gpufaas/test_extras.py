"""What is said of packages that an installation lacks."""

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gpufaas import extras
from gpufaas.cli import EXIT_BAD_USE, main

PIP = [sys.executable, "-m", "pip", "install"]


class Installed:
    """Stands for the project's own distribution, with what pip wrote of where it came from."""

    def __init__(self, origin: object) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return json.dumps(self._origin) if self._origin else None


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        (None, ["gpufaas[gpu]"]),
        ({"url": "file:///work/my%20clone", "dir_info": {}}, ["/work/my clone[gpu]"]),
        (
            {"url": "file:///work/main", "dir_info": {"editable": True}},
            ["--editable", "/work/main[gpu]"],
        ),
        ({"url": "file:///w/g-1.whl", "archive_info": {}}, ["/w/g-1.whl[gpu]"]),
        (
            {"url": "https://x.example/g", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            ["gpufaas[gpu] @ git+https://x.example/g@c0ffee"],
        ),
        (
            {"url": "https://x.example/g-1.whl", "archive_info": {}},
            ["gpufaas[gpu] @ https://x.example/g-1.whl"],
        ),
    ],
)
def test_command_installs_from_where_gpufaas_came_from(
    origin: object, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(origin))
    assert shlex.split(extras.install_command("gpu")) == [*PIP, *asked]


def test_all_that_an_extra_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    required = [
        "msgspec>=0.20",
        "no-such-one>=1; extra == 'gpu'",
        "pytest; extra == 'gpu'",
        'no_such_two[x]>=2; (python_version > "3") and extra == "gpu"',
        "no-such-three; extra == 'control'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    assert extras.lacking("gpu") == ["no-such-one", "no_such_two"]
    assert extras.needs("gpu", "x").startswith("needs no-such-one, no_such_two: ")


def test_nothing_is_named_where_nobody_installed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setattr(metadata, "distribution", missing)
    assert extras.lacking("gpu") == []
    assert extras.needs("gpu", "torch") == f"needs torch: {shlex.join([*PIP, 'gpufaas[gpu]'])}"


@pytest.mark.parametrize(
    "words",
    [
        ["exec", "--", "true"],
        ["check", __file__],
        ["gpu-manager"],
        ["up", "--devices", "cpu:2"],
        ["up", "--examples"],
    ],
)
def test_command_that_needs_torch_says_so_at_once(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUFAAS_STATE", str(tmp_path))
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    assert main(words) == EXIT_BAD_USE
    assert capsys.readouterr().err.startswith(f"gpufaas {words[0]}: needs torch: ")
