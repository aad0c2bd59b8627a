"""Processes under the shim that run snippets, each in a fork."""

from collections.abc import Iterator

import pytest

from tests.kit.programs.snippets import Snippet, shim_environment, snippets

pytestmark = pytest.mark.group("shim", seconds=550)  # of all modules here

_DYNAMO = "torch._dynamo"


@pytest.fixture(scope="session")
def shim() -> Iterator[Snippet]:
    """Runs a snippet under the shim, with torch imported."""
    with snippets(shim_environment()) as found:
        yield found


@pytest.fixture(scope="session")
def dynamo_shim() -> Iterator[Snippet]:
    """The same with Dynamo imported too, which takes as long again."""
    with snippets(shim_environment(), _DYNAMO) as found:
        yield found


@pytest.fixture(scope="session")
def tracing_shim() -> Iterator[Snippet]:
    """The same where a module's first call waits for its graph."""
    with snippets(shim_environment(GPUFAAS_CAPTURE="1", GPUFAAS_TRACING="wait"), _DYNAMO) as found:
        yield found
