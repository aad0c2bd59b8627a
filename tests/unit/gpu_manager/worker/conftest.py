"""What every test of a worker's parts leaves behind it."""

import resource
from collections.abc import Iterator

import pytest

from torch_shim.wire.arithmetic import arithmetic_in_force, use_arithmetic


@pytest.fixture(autouse=True)
def _unlimited_afterwards() -> Iterator[None]:
    """A worker caps its address space, which here is that of all tests."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(autouse=True)
def _arithmetic_as_before() -> Iterator[None]:
    """A call computes with its function's settings, which here are those of all tests."""
    before = arithmetic_in_force()
    yield
    use_arithmetic(before)
