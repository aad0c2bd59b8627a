"""What an administrator asks of a manager, and who may be one."""

from pathlib import Path

import pytest

from common.addresses import TcpAddress, UnixAddress
from tests.kit.nodes.manager_client import manager, refusal, weights
from torch_shim.wire.protocol import FrameKind

pytestmark = pytest.mark.timeout(180, func_only=True)

LOCALHOST = TcpAddress("127.0.0.1", 0)


async def test_models_are_listed_for_the_managers_own_user() -> None:
    async with manager() as it:
        resident, stored = weights(b"resident"), weights(b"stored")
        client = await it.client("reader")
        await client.upload(resident)
        await client.upload(stored)
        _, (end,) = await client.acquire(resident.digest)
        administrator = await it.stranger()
        await administrator.hello("", role="admin")

        answer, _ = await administrator.ask(FrameKind.ADMIN, {"do": "models"})

        first, second = answer["models"]
        assert first["model"] == f"team/{resident.digest[:20]}"
        assert (first["label"], first["gpu"], first["tier"]) == ("reader", "node/cpu:0", "gpu")
        assert (first["uses"], first["pinned"], first["state"]) == (0, False, "loaded")
        assert (first["runtime"], first["process_models"], first["gpu_share"]) == ("process", 1, 1)
        assert second["model"] == f"team/{stored.digest[:20]}"
        assert (second["gpu"], second["tier"]) == (None, "host")
        assert (second["runtime"], second["process_models"]) == (None, 0)
        end.close()
        for image in (resident, stored):
            image.close()


async def test_model_is_pinned_evicted_and_unpinned_when_an_administrator_says_so() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client("reader")
        await client.upload(image)
        answer, (end,) = await client.acquire(image.digest)
        administrator = await it.stranger()
        await administrator.hello("", role="admin")
        order = {"model": "reader"}
        await administrator.ask(FrameKind.ADMIN, order | {"do": "pin"})
        await client.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
        await client.hint()

        evict = administrator.ask(FrameKind.ADMIN, order | {"do": "evict"})
        assert await refusal(evict) == "not allowed"
        await administrator.ask(FrameKind.ADMIN, order | {"do": "unpin"})
        await administrator.ask(FrameKind.ADMIN, order | {"do": "evict"})

        status, _ = await administrator.ask(FrameKind.ADMIN, {"do": "status"})
        assert status["gpus"][0]["models"] == 0
        assert status["evictions"] == 1
        unknown = administrator.ask(FrameKind.ADMIN, {"do": "evict", "model": "nobody"})
        assert await refusal(unknown) == "unknown model"
        end.close()
        image.close()


async def test_administration_is_refused_when_it_comes_from_elsewhere(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        client = await it.stranger(str(it.node.addresses[1]))
        assert await refusal(client.hello(it.credential(), role="admin")) == "not allowed"

        administrator = await it.stranger(str(it.node.addresses[1]))
        credential = it.node.credential("admin", "*")
        assert (await administrator.hello(credential, role="admin"))["local"] is False
