"""What the gateway's port makes of requests that are ambiguous, endless or unusual.

It stands for every server that serves by common.http: the scheduler's and the exporter's too. The
runtime in a function has a parser of its own, and the same tests.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.kit.network.hostile_requests import (
    REFUSED,
    SERVED,
    status_of,
    statuses_behind_an_upgrade,
)
from tests.kit.outcomes import awaited_outcome
from tests.kit.worlds.gateway_world import gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_ambiguous_or_endless_request_is_refused(tmp_path: Path) -> None:
    paths = (b"POST /function/f", b"POST /async-function/f", b"POST /system/functions")
    wrong = []
    async with gateway_world(tmp_path) as world:
        for hostile, path in product(REFUSED, paths):
            status = await awaited_outcome(status_of(world.gateway.address, path, hostile))
            if status not in hostile.statuses:
                wrong.append((hostile.name, path, status))
    assert wrong == []


async def test_unusual_request_is_served(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        address = world.gateway.address
        statuses = {
            served.name: await awaited_outcome(status_of(address, b"GET /healthz", served))
            for served in SERVED
        }
    assert statuses == {served.name: 200 for served in SERVED}


async def test_request_behind_an_unknown_upgrade_is_answered(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        found = await statuses_behind_an_upgrade(world.gateway.address, b"GET /healthz")
        assert found == [200, 200]
