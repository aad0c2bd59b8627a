"""`gpufaas config`: files that say what is in force."""

import re
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.config import as_toml
from gpufaas.options.configuration import AllSettings, read_settings

Output = pytest.CaptureFixture[str]


def test_sample_is_a_file_of_all_settings_that_changes_none(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "sample"]) == 0
    sample = capsys.readouterr().out
    usual = tmp_path / "usual.toml"
    usual.write_text(sample)
    assert read_settings(str(usual), {}, {}) == AllSettings()
    every = tmp_path / "every.toml"
    every.write_text(re.sub(r"^#(?=\w+ = )", "", sample, flags=re.MULTILINE))
    assert every.read_text().count("\n#") == 0
    assert read_settings(str(every), {}, {}) == AllSettings()


def test_what_is_shown_says_the_same_again(tmp_path: Path) -> None:
    file = tmp_path / "gpufaas.toml"
    file.write_text(
        """
        policy = "gain"
        parameters = {overlap = 0}
        [etcd]
        endpoints = ["http://127.0.0.1:2379", "http://127.0.0.1:2381"]
        [tracing]
        ratio = 0.5
        [billing]
        gpu_types = {"NVIDIA A100" = 2.5}
        """
    )
    settings = read_settings(str(file), {"GPUFAAS_NODE_DEVICES": "cpu:4"}, {})
    shown = tmp_path / "shown.toml"
    shown.write_text(as_toml(settings))
    assert read_settings(str(shown), {}, {}) == settings
    assert settings != AllSettings()


def test_show_names_the_file_and_what_differs(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config"]) == 0
    assert capsys.readouterr().out.startswith("# No gpufaas.toml, and GPUFAAS_* of this shell.\n")
    Path("gpufaas.toml").write_text("[scheduler]\nhistory = 5\n")
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# gpufaas.toml,")
    assert [line for line in lines if line and line[0] not in "#["] == ["history = 5"]


def test_bad_file_is_refused_as_at_a_start(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("polcy = 1")
    assert main(["config", "show", "--config", str(file)]) == EXIT_BAD_USE
    assert "unknown key 'polcy'" in capsys.readouterr().err
