"""Processes under the shim that run snippets, each in a fork."""

import os
from collections.abc import Iterator

import pytest

from tests.kit.places import ACTIVATE
from tests.kit.programs.snippets import Snippet, snippets

pytestmark = pytest.mark.group("shim", seconds=550)  # of all modules here

_DYNAMO = "torch._dynamo"


def shim_environment(**more: str) -> dict[str, str]:
    """The environment of a process under the shim, as a launcher sets it."""
    ours = ("GPUFAAS_", "OMP_WAIT_POLICY")  # of the second the shim takes care
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    shim = {"PYTHONPATH": str(ACTIVATE), "GPUFAAS_ENABLED": "1", "GPUFAAS_CAPTURE": "0"}
    return {**kept, "OMP_NUM_THREADS": "2", "GPUFAAS_GPU_MEMORY": str(8 << 30), **shim, **more}


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
