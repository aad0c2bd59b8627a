"""Nodes in a test's own process have fork servers that are forked, with torch."""

from collections.abc import Iterator

import pytest

from tests.kit.programs.torch_forks import forked_fork_servers


@pytest.fixture(scope="module", autouse=True)
def quick_fork_servers() -> Iterator[None]:
    """A module whose subject is the fork server replaces this fixture."""
    with forked_fork_servers():
        yield
