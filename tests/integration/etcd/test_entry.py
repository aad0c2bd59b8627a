"""An etcd that lets only some in: users with passwords, and TLS."""

import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from gpufaas.etcd import etcd_server
from scheduler.adapters.etcd_channel import EtcdChannel, EtcdSettings
from scheduler.adapters.store_etcd import EtcdStore
from scheduler.errors import StoreError, StoreUnavailable
from tests.etcd_world import EtcdWorld, an_etcd, needs_etcd

pytestmark = [pytest.mark.etcd, needs_etcd]

LOG = logging.getLogger("tests.entry")


async def let_only_root_in(world: EtcdWorld) -> EtcdSettings:
    """Switch on users; the settings of the one that there is."""
    channel = EtcdChannel(EtcdSettings((world.url,)), LOG)
    root = {"name": "root", "password": "open sesame"}
    for method, request in (
        ("UserAdd", rpc.AuthUserAddRequest(**root)),
        ("RoleAdd", rpc.AuthRoleAddRequest(name="root")),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root")),
        ("AuthEnable", rpc.AuthEnableRequest()),
    ):
        await channel.call("auth", method, request)
    await channel.close()
    return EtcdSettings((world.url,), user="root", password=root["password"])


def test_a_user_is_let_in_when_the_password_is_right_and_else_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with an_etcd(tmp_path) as world:
            settings = await let_only_root_in(world)
            async with EtcdStore(settings, LOG) as store:
                await store.put("a", b"1")
                assert await store.get("a") == b"1"
                lease = await store.grant(3)
                assert await store.refresh(lease)
            for wrong in (EtcdSettings((world.url,)), replace(settings, password="guess")):
                store = EtcdStore(wrong, LOG)
                with pytest.raises(StoreError):
                    await store.put("a", b"2")
                await store.close()

    asyncio.run(test())


def test_a_user_is_let_in_again_when_etcd_has_forgotten_the_pass(tmp_path: Path) -> None:
    async def test() -> None:
        async with an_etcd(tmp_path) as world:
            store = EtcdStore(await let_only_root_in(world), LOG)
            await store.put("a", b"1")
            await world.kill()  # passes are in its memory
            await world.start()
            answers: list[bytes | str | None] = []
            async with asyncio.timeout(10):
                while answers[-1:] != [b"1"]:
                    try:
                        answers.append(await store.get("a"))
                    except StoreUnavailable as error:
                        answers.append(str(error))
                        await asyncio.sleep(0.1)
            assert not [text for text in answers if "auth" in str(text)]
            await store.close()

    asyncio.run(test())


def test_a_connection_is_private_when_the_endpoint_is_https(tmp_path: Path) -> None:
    async def test() -> None:
        plain, private = free_ports()
        urls = f"http://127.0.0.1:{plain},https://127.0.0.1:{private}"
        options = ["--auto-tls", f"--listen-client-urls={urls}"]
        async with etcd_server(tmp_path, LOG, port=plain, options=options):
            certificate = tmp_path / "data" / "fixtures" / "client" / "cert.pem"
            settings = EtcdSettings((f"https://127.0.0.1:{private}",), ca_file=certificate)
            async with EtcdStore(settings, LOG) as store:
                await store.put("a", b"1")
                assert await store.get("a") == b"1"
            store = EtcdStore(replace(settings, ca_file=None), LOG)
            with pytest.raises(StoreUnavailable):  # nobody vouches for this certificate
                await store.get("a")
            await store.close()

    asyncio.run(test())


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
