"""The same events give the same actions: in a fresh core, and in a fresh process."""

import subprocess
import sys

import pytest

from scheduler import policies
from scheduler.composition import make_core
from tests.kit.cores.action_digest import lived
from tests.kit.cores.random_lives import LEAVING
from tests.kit.places import ROOT


@pytest.mark.parametrize("policy", policies.available())
def test_core_answers_the_same_when_a_recorded_log_is_replayed(policy: str) -> None:
    world = lived(policy, seed=3, count=1500)
    fresh = make_core(policy, settings=LEAVING)
    assert [fresh.handle(event, now) for event, now in world.log] == world.answers
    assert sum(len(actions) for actions in world.answers) > 500


def test_core_answers_the_same_when_strings_hash_otherwise() -> None:
    """Hash seeds change the order of sets, and nothing else."""
    digests = {
        subprocess.run(
            [sys.executable, "-m", "tests.kit.cores.action_digest"],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 64
