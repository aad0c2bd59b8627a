"""Recordings of wild lives under every policy, compared with every other policy."""

import pytest

from scheduler import policies
from tests.kit.cores.written_recordings import check_wild_life

pytestmark = pytest.mark.group("wild_lives", seconds=160)


@pytest.mark.parametrize("policy", policies.available())
def test_every_request_is_accounted_for_under_every_other_policy(policy: str) -> None:
    check_wild_life(policy, 5, policies.available())


@pytest.mark.parametrize("policy", policies.available())
def test_every_request_is_accounted_for_when_a_model_never_loads(policy: str) -> None:
    """Whichever policy decides tries to load it again."""
    check_wild_life(policy, 105, ("lalbo3", "rr"))
