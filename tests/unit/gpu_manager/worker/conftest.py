"""What every test of a worker's parts leaves behind it."""

import resource
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _unlimited_afterwards() -> Iterator[None]:
    """A worker caps its address space, which here is that of all tests."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
