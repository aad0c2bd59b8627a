"""The script that makes the secrets of docker-compose.yml, and makes them again."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.kit import needs
from tests.kit.places import ROOT

SCRIPT = ROOT / "deploy" / "compose" / "secrets.sh"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    needs.root()
    needs.command("openssl", "openssl")
    make(tmp_path)
    return tmp_path


def make(folder: Path) -> None:
    environment = {"PATH": os.defpath, "GPUFAAS_SECRETS": str(folder)}
    subprocess.run(["sh", str(SCRIPT)], env=environment, check=True, capture_output=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_changes_when_everything_is_there(secrets: Path) -> None:
    before = content(secrets)
    make(secrets)
    assert content(secrets) == before


def test_certificates_are_of_the_authority_when_that_was_removed(secrets: Path) -> None:
    before = content(secrets)
    (secrets / "ca.pem").unlink()
    make(secrets)
    for name in ("etcd.pem", "scheduler.pem"):
        assert (secrets / name).read_bytes() != before[name]
        verify = ["openssl", "verify", "-CAfile", str(secrets / "ca.pem"), str(secrets / name)]
        subprocess.run(verify, check=True, capture_output=True)


@pytest.mark.parametrize("removed", ["nats-password", "nats-users"])
def test_both_files_have_the_same_password_when_one_was_removed(
    secrets: Path, removed: str
) -> None:
    before = content(secrets)
    (secrets / removed).unlink()
    make(secrets)
    password = (secrets / "nats-password").read_text()
    assert password.encode() != before["nats-password"]
    assert password.strip() in (secrets / "nats-users").read_text()
