"""Which stack commands speak to: a named one, the running one of a folder, never another's."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.options.shared import cluster_secret
from gpufaas.stack_folder import RunningStack, StackFolder
from scheduler.service.access import ApiRole, token
from tests.kit.network.answering import answering

# Every command that asks a server, with what it needs to be complete.
COMMANDS: Sequence[Sequence[str]] = (
    ("status", "--once"), ("top", "--once"), ("bill",), ("policy", "get"), ("quota", "list"),
    ("explain",), ("trace",), ("models",), ("pin", "m"), ("unpin", "m"), ("evict", "m"),
    ("prefetch", "m"), ("workflow", "list"),
)  # fmt: skip
_NAMED_ELSEWHERE = ("GPUFAAS_SCHEDULER", "OPENFAAS_URL", "GPUFAAS_TOKEN", "secret_mount_path")


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in _NAMED_ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUFAAS_STATE", str(tmp_path))


@contextmanager
def a_stack(root: Path, url: str) -> Iterator[StackFolder]:
    """A stack that is up: another process would hold the folder's lock."""
    folder = StackFolder(root)
    folder.make()
    cluster_secret(str(folder.secret_file), {}, make=True)
    with folder.held():
        folder.record(RunningStack(1, url, url, "unix:/none"))
        yield folder


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_command_names_the_folder_when_nothing_is_up_there(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_BAD_USE
    said = capsys.readouterr().err
    assert f"nothing is up in {tmp_path}: " in said
    assert said.startswith(f"gpufaas {words[0]}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_command_names_the_process_when_a_stack_is_starting(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StackFolder(tmp_path).held():
        assert main(words) == EXIT_BAD_USE
    starting = f"a stack is starting in {tmp_path} (process {os.getpid()}): try again"
    assert starting in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["pin", "unpin", "evict", "prefetch"])
def test_order_goes_to_the_stack_of_the_folder_with_its_secret(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFAAS_TOKEN", "another cluster's")
    monkeypatch.setenv("GPUFAAS_SCHEDULER_SECRET_FILE", str(tmp_path / "another cluster's"))
    with (
        answering(200, {"done": verb, "model": "team/m"}) as (url, asked),
        a_stack(tmp_path, url) as folder,
    ):
        assert main([verb, "reader"]) == 0
        bearer = token(folder.secret_file.read_bytes(), ApiRole.ADMIN)
        assert asked == [f"/models/reader/{verb} Bearer {bearer}"]
    assert capsys.readouterr().out == f"{verb}: team/m\n"


def test_models_of_a_function_are_those_of_the_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {"memory_bytes": 1, "load_s": {}, "run_s": {}, "rate": 0.0, "waiting": 0}
    of_reader = {"model": "team/1", "functions": ["team/reader"], "holders": [], **shown}
    other = {"model": "team/2", "functions": ["team/writer"], "holders": [], **shown}
    with answering(200, {}) as (url, _), a_stack(tmp_path, url):
        pass
    with answering(200, [of_reader, other]) as (url, asked), a_stack(tmp_path, url):
        assert main(["models", "--json"]) == 0
        assert [row["model"] for row in json.loads(capsys.readouterr().out)] == ["team/1", "team/2"]
        assert main(["models", "reader", "--json"]) == 0
        assert [line.split()[0] for line in asked][1:] == ["/models", "/models/team/1"]
        assert main(["models", "nobody"]) == EXIT_BAD_USE
    assert "no model 'nobody': a function has none if it uses no GPU" in capsys.readouterr().err


def test_explicit_scheduler_is_asked_although_a_stack_is_up(tmp_path: Path) -> None:
    cluster_secret(str(tmp_path / "theirs"), {}, make=True)
    with (
        answering(200, {"policy": "lb", "parameters": {}}) as (ours, asked),
        answering(200, {"policy": "lb", "parameters": {}}) as (theirs, asked_there),
        a_stack(tmp_path, ours),
    ):
        words = ["policy", "get", "--scheduler", theirs, "--secret-file", str(tmp_path / "theirs")]
        assert main(words) == 0
        assert (len(asked), len(asked_there)) == (0, 1)


def test_no_other_scheduler_gets_the_token_of_the_stack_that_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"policy": "lb", "parameters": {}}
    with (
        answering(200, policy) as (ours, asked),
        answering(200, policy) as (theirs, asked_there),
        a_stack(tmp_path, ours) as stack,
    ):
        assert main(["policy", "get", "--scheduler", theirs]) == EXIT_BAD_USE
        assert f"name that of {theirs} with --secret-file" in capsys.readouterr().err
        monkeypatch.setenv("GPUFAAS_SCHEDULER", theirs)
        assert main(["policy", "get"]) == EXIT_BAD_USE
        assert asked_there == []
        assert main(["policy", "get", "--scheduler", ours.replace("127.0.0.1", "localhost")]) == 0
        assert main(["policy", "get", "--secret-file", str(stack.secret_file)]) == 0  # as ordered
        assert (len(asked), len(asked_there)) == (1, 1)


def test_no_other_gateway_gets_the_password_of_the_stack_that_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        answering(200, []) as (ours, asked),
        answering(200, []) as (theirs, asked_there),
        a_stack(tmp_path, ours) as stack,
    ):
        stack.credentials.mkdir()
        for name in ("user", "password"):
            (stack.credentials / f"basic-auth-{name}").write_text(name)
        monkeypatch.setenv("OPENFAAS_URL", theirs)
        assert main(["workflow", "list"]) == 0
        monkeypatch.delenv("OPENFAAS_URL")
        assert main(["workflow", "list"]) == 0
        assert main(["workflow", "list", "--gateway", ours.replace("127.0.0.1", "localhost")]) == 0
    assert asked_there == ["/system/workflows None"]
    assert [line.split()[1] for line in asked] == ["Basic", "Basic"]


def test_command_names_the_variable_when_it_leads_to_the_gateway_of_another_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"message": "no"}
    with answering(200, []) as (ours, _), answering(401, refused) as (theirs, _):
        monkeypatch.setenv("OPENFAAS_URL", theirs)
        with a_stack(tmp_path, ours):
            assert main(["top", "--once"]) == EXIT_BAD_USE
            said = f"OPENFAAS_URL names {theirs}, which is not the stack in {tmp_path}: unset it"
            assert said in capsys.readouterr().err
            assert main(["top", "--once", "--gateway", theirs]) == EXIT_BAD_USE
        assert f"{theirs} needs a login: name the folder" in capsys.readouterr().err


def test_command_says_whose_secret_it_lacks_when_a_scheduler_has_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(401, {"message": "no valid credentials"}) as (url, _), a_stack(tmp_path, url):
        assert main(["status"]) == EXIT_BAD_USE
        assert f"{url} has another secret than this command" in capsys.readouterr().err


def test_command_reports_a_folder_that_is_another_users_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUFAAS_STATE", str(tmp_path / "file"))
    assert main(["status"]) == EXIT_BAD_USE
    assert capsys.readouterr().err == f"gpufaas status: {tmp_path}/file/lock: Not a directory\n"


def test_record_of_a_killed_stack_names_nobody_when_the_next_one_starts(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    folder.make()
    folder.record(RunningStack(1, "http://old", "http://old", "unix:/old"))
    with folder.held():
        assert folder.running() is None
        assert folder.holder() == RunningStack(os.getpid())
