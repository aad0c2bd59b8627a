"""What parsers log of hostile inputs is kept out of the reports of tests."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """A surrogate in a captured line could not be sent from a test's process to the main one."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
