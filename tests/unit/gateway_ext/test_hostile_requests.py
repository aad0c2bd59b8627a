"""What the gateway's port makes of requests that are ambiguous, endless or unusual."""

from operator import attrgetter
from pathlib import Path

import pytest

from tests.kit.network.hostile_requests import (
    REFUSED,
    SERVED,
    HostileRequest,
    status_of,
    statuses_behind_an_upgrade,
)
from tests.kit.worlds.gateway_world import gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)


@pytest.mark.parametrize("hostile", REFUSED, ids=attrgetter("name"))
async def test_ambiguous_or_endless_request_is_refused(
    hostile: HostileRequest, tmp_path: Path
) -> None:
    async with gateway_world(tmp_path) as world:
        for path in (b"POST /function/f", b"POST /async-function/f", b"POST /system/functions"):
            assert await status_of(world.gateway.address, path, hostile) in hostile.statuses


@pytest.mark.parametrize("served", SERVED, ids=attrgetter("name"))
async def test_unusual_request_is_served(served: HostileRequest, tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        assert await status_of(world.gateway.address, b"GET /healthz", served) == 200


async def test_request_behind_an_unknown_upgrade_is_answered(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        found = await statuses_behind_an_upgrade(world.gateway.address, b"GET /healthz")
        assert found == [200, 200]
