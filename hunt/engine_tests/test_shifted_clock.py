"""The clock that the campaign shifts: a process under it sees the jump, and time that goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hunt.campaign.worlds.shifted_clock import ShiftedClock
from tests.kit import needs

_PROGRAM = """
import time
for _ in range(3):
    input()
    print(time.time(), time.monotonic(), flush=True)
"""
_NEAR_S = 60.0  # of an hour: a machine under load takes its time


def test_wall_clock_jumps_and_monotonic_clock_does_not(tmp_path: Path) -> None:
    needs.command("cc", "gcc")
    clock = ShiftedClock(tmp_path / "clock")
    environment = {**os.environ, **clock.environment}  # noqa: TID251 - for a child
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as child:
        asking, answers = child.stdin, child.stdout
        assert asking is not None
        assert answers is not None

        def shifts() -> tuple[float, float]:
            print(file=asking, flush=True)
            wall_s, monotonic_s = map(float, answers.readline().split())
            return wall_s - time.time(), monotonic_s - time.monotonic()

        assert shifts() == pytest.approx((0.0, 0.0), abs=_NEAR_S)
        clock.pass_time(3_600.0)
        clock.jump(-7_200.0)
        assert shifts() == pytest.approx((-3_600.0, 0.0), abs=_NEAR_S)
        clock.jump(0.0)
        assert shifts() == pytest.approx((3_600.0, 0.0), abs=_NEAR_S)
