"""Functions that give their leases back early: real managers, workers, shims and a scheduler."""

import asyncio
import logging
import random
from pathlib import Path

from gpu_manager.node.leases_in_force import LeaseTimes
from tests.kit.processes.gateway_like import gateway_like
from tests.kit.waiting import wait_until

LOG = logging.getLogger(__name__)

RUN_S, AFTER_S = 0.010, 0.040
# A lease that is not used stays in force: what is measured is what goes back early.
PATIENT = LeaseTimes(quiet_s=1.0, quantum_s=10.0)


def rate(folder: Path, early_return: str) -> float:
    """Requests a second of five callers, once the function's habits are known."""
    with gateway_like(folder, RUN_S, early_return, leases=PATIENT) as it:
        it.rate(5, 0.5, AFTER_S)
        return it.rate(5, 2.0, AFTER_S)


def test_gpu_serves_others_when_a_function_works_on_after_its_last_call(tmp_path: Path) -> None:
    """10 ms on the GPU and 40 ms without it: at most 100 and 20 requests a second."""
    kept, early = rate(tmp_path, "0"), rate(tmp_path, "1")
    LOG.info("%.1f requests a second, %.1f with early returns", kept, early)
    assert kept < 1 / (RUN_S + AFTER_S)
    assert 2 * kept < early < 1 / RUN_S


def test_lease_goes_back_when_five_requests_before_were_alike(tmp_path: Path) -> None:
    with gateway_like(tmp_path, 0.0) as it:
        for _ in range(5):
            assert it.call(2).used == it.used
        assert it.returned == []
        sixth = it.call(2, after_s=0.2)
        assert sixth.right
        assert sixth.used == it.used
        assert it.returned == [sixth.lease]
        wait_until(it.all_ended_once, "each lease has ended once", within_s=5.0)


def test_lease_is_kept_when_early_returns_are_switched_off(tmp_path: Path) -> None:
    with gateway_like(tmp_path, 0.0, "0") as it:
        for _ in range(8):
            assert it.call().right
        assert it.returned == []
        wait_until(it.all_ended_once, "each lease has ended once", within_s=5.0)


def test_request_comes_back_when_it_makes_a_further_call(tmp_path: Path) -> None:
    with gateway_like(tmp_path, 0.0) as it:
        for _ in range(5):
            it.call()
        further = it.call(3)
        assert further.right
        assert it.returned == [further.lease]
        assert it.granted[further.request] == 2
        for _ in range(9):
            assert it.call().right
        assert len(it.returned) == 1  # twice as many have to be alike now
        wait_until(it.all_ended_once, "each lease has ended once", within_s=5.0)
        wait_until(lambda: it.node.leases() == 0, "no lease is left", within_s=5.0)


def test_answers_are_right_when_some_requests_of_many_make_further_calls(tmp_path: Path) -> None:
    chance = random.Random(7)
    with gateway_like(tmp_path, 0.002) as it:

        async def caller() -> None:
            for number in range(24):
                calls = 1 if number < 6 or chance.random() < 0.8 else 2
                assert (await it.served(calls, 0.005)).right

        async def callers() -> None:
            await asyncio.gather(*(caller() for _ in range(5)))

        it.node.do(callers())
        assert it.returned
        assert max(it.granted.values()) == 2
        wait_until(it.all_ended_once, "each lease has ended once", within_s=5.0)
        wait_until(lambda: it.node.leases() == 0, "no lease is left", within_s=5.0)
