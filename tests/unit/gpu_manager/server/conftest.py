"""What tests of managers in a cluster share."""

from collections.abc import Iterator

import pytest

from tests.unit.gpu_manager.server import patient_times


@pytest.fixture
def patient_streams() -> Iterator[None]:
    """Streams between manager and scheduler that only a test breaks."""
    with patient_times.patient_streams():
        yield
