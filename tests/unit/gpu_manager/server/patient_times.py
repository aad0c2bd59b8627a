"""Times that do not run out, or count as silence, while a busy machine holds this process up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gpu_manager.node.leases_in_force import LeaseTimes
from tests.kit.worlds import joined_manager
from tests.kit.worlds.cluster_in_process import TIMES, a_scheduler

PATIENT = LeaseTimes(linger_s=60.0, first_call_s=60.0, claim_s=60.0)
GRACE_S = 120.0  # that a node whose stream broke has


@contextmanager
def patient_streams() -> Iterator[None]:
    """Streams that only a test breaks: a break of a moment refuses questions, and moves leases."""
    times = replace(TIMES, silence_s=60.0, greeting_s=60.0, grace_s=GRACE_S)
    defaults = a_scheduler.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_manager, "TIMES", times)
        patch.setitem(defaults, "times", times)
        yield
