"""One `gpufaas up` for all of these tests, and the ways to use it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.engines.faas_cli import NoFaasCli, faas_cli
from tests.kit.folder_fixtures import of_folder
from tests.kit.stacks.drivers import CliDriver, RestDriver
from tests.kit.stacks.stack import Rest, Stack, stack

pytestmark = pytest.mark.group("up", seconds=620)  # of all modules here


@pytest.fixture(scope="module")
def up(request: pytest.FixtureRequest, environment: Mapping[str, str]) -> Stack:
    """The stack that all tests share; none of its parts may trip over what they do to it."""
    return of_folder(request, Path(__file__).parent, lambda: _started(environment))


@contextmanager
def _started(environment: Mapping[str, str]) -> Iterator[Stack]:
    with stack(environment) as found:
        found.start()
        yield found
        for log in sorted((found.state / "logs").glob("*.log")):
            assert "Traceback" not in log.read_text(errors="replace"), f"{log}\n{found.said()}"


@pytest.fixture
def own(environment: Mapping[str, str]) -> Iterator[Stack]:
    """A stack for one test, not yet up."""
    with stack(environment) as found:
        yield found


@pytest.fixture(scope="session")
def chaos_s() -> float:
    """How long things are killed."""
    return float(os.environ.get("GPUFAAS_E2E_SECONDS", "10"))


@pytest.fixture
def rest(up: Stack) -> Rest:
    """HTTP towards the shared one."""
    return Rest(up)


@pytest.fixture
def driver(up: Stack, tmp_path: Path) -> RestDriver:
    """Plain REST towards the shared one."""
    return RestDriver(up, tmp_path)


@pytest.fixture
def cli(up: Stack, tmp_path: Path) -> CliDriver:
    """faas-cli, logged in to the shared one."""
    try:
        program = faas_cli()
    except NoFaasCli as error:
        pytest.skip(str(error))
    return CliDriver(up, tmp_path, program, os.environ.get("PATH", os.defpath))
