"""Credentials: only the manager's own secret makes them, and its file is its owner's alone."""

import errno
import os
import stat
from pathlib import Path

import pytest

from common.gpu_wishes import GpuWishes
from gpu_manager.credentials import (
    ADMINISTRATOR,
    FunctionCredentials,
    FunctionIdentity,
    fresh_secret,
    load_secret,
)
from gpu_manager.errors import BadSetting
from tests.kit import needs

RESNET = FunctionIdentity("team-a", "resnet")


def test_credential_names_its_function_when_the_secret_is_the_same() -> None:
    secret = fresh_secret()

    credential = FunctionCredentials(secret).issue(RESNET)

    assert FunctionCredentials(secret).identify(credential) == RESNET


def test_a_credential_carries_what_the_deployment_wishes() -> None:
    credentials = FunctionCredentials(fresh_secret())
    wishes = GpuWishes("stream", 0.25, 12)
    asked = FunctionIdentity("team-a", "resnet", wishes)

    found = credentials.identify(credentials.issue(asked))

    assert found is not None
    assert (found, found.wishes) == (RESNET, wishes)


def test_nobody_but_the_manager_changes_the_wishes() -> None:
    credentials = FunctionCredentials(fresh_secret())
    text = credentials.issue(FunctionIdentity("team-a", "resnet", GpuWishes("process")))

    for forged in (text.replace("process", "stream"), text.replace("?runtime=process", "")):
        assert credentials.identify(forged) is None


@pytest.mark.parametrize(
    "forge",
    [
        lambda text: text.replace("team-a", "team-b"),
        lambda text: text.replace("resnet", "other"),
        lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"),
        lambda text: text.rpartition(":")[0] + ":",
        lambda text: text.rpartition(":")[2],
        lambda _: "",
        lambda _: "\N{SNOWMAN}:\N{SNOWMAN}",
    ],
)
def test_credential_is_refused_when_anything_of_it_changed(forge) -> None:  # type: ignore[no-untyped-def]  # a lambda
    credentials = FunctionCredentials(fresh_secret())

    assert credentials.identify(forge(credentials.issue(RESNET))) is None


def test_credential_is_refused_when_another_secret_made_it() -> None:
    assert (
        FunctionCredentials(fresh_secret()).identify(
            FunctionCredentials(fresh_secret()).issue(RESNET)
        )
        is None
    )


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "-a", "a b", "a" * 300])
def test_credential_is_not_issued_when_a_name_could_be_misread(name: str) -> None:
    with pytest.raises(BadSetting):
        FunctionCredentials(fresh_secret()).issue(FunctionIdentity("team-a", name))


def test_secret_file_is_made_for_its_owner_alone_when_it_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"

    first = load_secret(path)

    assert load_secret(path) == first
    assert len(first) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("content", "mode", "detail"),
    [(b"x" * 32, 0o644, "chmod 600"), (b"short", 0o600, "shorter")],
)
def test_secret_file_is_refused_when_it_protects_nothing(
    tmp_path: Path, content: bytes, mode: int, detail: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)

    with pytest.raises(BadSetting, match=detail):
        load_secret(path)


def _of_another_user(path: Path, mode: int) -> Path:
    needs.root()
    path.write_bytes(b"x" * 32)
    path.chmod(mode)
    os.chown(path, 4_711, os.getegid())
    return path


def test_secret_file_of_another_user_is_read_when_our_group_alone_may(tmp_path: Path) -> None:
    assert load_secret(_of_another_user(tmp_path / "secret", 0o440)) == b"x" * 32


@pytest.mark.parametrize("mode", [0o460, 0o444])
def test_secret_file_of_another_user_is_refused_when_more_may(tmp_path: Path, mode: int) -> None:
    path = _of_another_user(tmp_path / "secret", mode)

    with pytest.raises(BadSetting, match="chmod 600"):
        load_secret(path)


def test_secret_file_is_named_when_it_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BadSetting, match="secret file"):
        load_secret(tmp_path / "file" / "secret")


def test_secret_file_is_made_although_an_earlier_life_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.with_name(f"secret.{os.getpid()}").touch()  # as one that was killed may leave it

    assert len(load_secret(path)) >= 32


def test_nothing_is_left_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "secret"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BadSetting, match="No space left"):
            load_secret(path)

    assert list(tmp_path.iterdir()) == []
    assert len(load_secret(path)) >= 32


def test_no_function_is_the_administrator_whatever_its_name() -> None:
    credentials = FunctionCredentials(fresh_secret())

    as_function = credentials.issue(FunctionIdentity("admin", "admin"))

    assert credentials.identify(as_function) != ADMINISTRATOR
    assert credentials.identify(credentials.issue(ADMINISTRATOR)) == ADMINISTRATOR
    with pytest.raises(BadSetting):
        credentials.issue(FunctionIdentity("team", "*"))
