"""`gpufaas up --without-etcd`: what it refuses."""

from pathlib import Path

import pytest

from gpufaas.cli import main
from gpufaas.stack.held_ports import HeldPort


def test_up_refuses_when_it_is_told_to_have_an_etcd_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUFAAS_ETCD_ENDPOINTS", "http://127.0.0.1:1")
    with HeldPort() as port:
        command = ["up", "--without-etcd", "--state", str(tmp_path / "s")]
        assert main([*command, "--listen", port.address]) != 0
    assert "the configuration names an etcd" in capsys.readouterr().err
