"""Credentials: made once, kept as OpenFaaS keeps them, and compared exactly."""

from base64 import b64encode
from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest, NotAllowed
from gateway_ext.openfaas.basic_auth import (
    PASSWORD_FILE,
    USER_FILE,
    Auth,
    BasicCredentials,
    credentials_in,
)

AUTH = Auth(BasicCredentials("admin", "pass:wörd"))


def basic(text: str) -> bytes:
    return b64encode(text.encode())


def test_missing_files_are_made_and_kept(tmp_path: Path) -> None:
    first = credentials_in(tmp_path / "new")
    assert first.user == "admin"
    assert len(first.password) >= 32
    assert credentials_in(tmp_path / "new") == first
    assert credentials_in(tmp_path / "other") != first


def test_files_that_are_made_are_for_their_owner_only(tmp_path: Path) -> None:
    credentials_in(tmp_path / "new")
    made = list((tmp_path / "new").iterdir())
    assert sorted(path.name for path in made) == [PASSWORD_FILE, USER_FILE]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}


def test_files_that_are_there_are_read_without_the_line_end(tmp_path: Path) -> None:
    (tmp_path / USER_FILE).write_text("me\n")
    (tmp_path / PASSWORD_FILE).write_text("secret\r\n")
    assert credentials_in(tmp_path) == BasicCredentials("me", "secret")


def test_an_empty_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / PASSWORD_FILE).write_text("\n")
    with pytest.raises(BadRequest, match="basic-auth-password is empty"):
        credentials_in(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"Basic " + basic("admin:pass:wörd"),
        b"basic  " + basic("admin:pass:wörd"),
        BasicCredentials("admin", "pass:wörd").header.encode(),
    ],
)
def test_the_credentials_are_accepted(header: bytes) -> None:
    AUTH.check(header)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Basic",
        b"Basic ",
        b"Basic " + basic("admin:pass"),
        b"Basic " + basic("admin:pass:wörd "),
        b"Basic " + basic("Admin:pass:wörd"),
        b"Basic " + basic("admin"),
        b"Basic " + basic("admin:pass:wörd")[:-1],
        b"Basic \xff\xfe",
        b"Bearer " + basic("admin:pass:wörd"),
        b"admin:pass:w\xc3\xb6rd",
    ],
)
def test_anything_else_does_not(header: bytes) -> None:
    with pytest.raises(NotAllowed, match="invalid credentials"):
        AUTH.check(header)
