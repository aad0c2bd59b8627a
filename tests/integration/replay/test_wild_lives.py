"""Recordings of wild lives under every policy, compared with others."""

import pytest

from scheduler import policies
from tests.kit.cores.written_recordings import check_wild_life

pytestmark = pytest.mark.group("wild_lives", seconds=10)

POLICIES = policies.available()


@pytest.mark.parametrize("number", range(len(POLICIES)), ids=POLICIES.__getitem__)
def test_every_request_is_accounted_for_under_the_next_three_policies(number: int) -> None:
    following = (POLICIES * 2)[number + 1 : number + 4]
    check_wild_life(POLICIES[number], 5, following)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_accounted_for_when_a_model_never_loads(policy: str) -> None:
    """Whichever policy decides tries to load it again."""
    check_wild_life(policy, 105, ("lalbo3", "rr"))
