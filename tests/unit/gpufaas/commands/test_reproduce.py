"""`gpufaas reproduce`: what it says where the experiments are not beside it."""

from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands import reproduce


def test_reproduce_says_that_it_needs_a_checkout_when_it_is_installed_without_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "CHECKOUT", tmp_path)

    assert main(["reproduce", "--paper", "sage"]) == EXIT_BAD_USE

    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "reproduce needs a checkout of gpufaas" in said
