"""An etcd of our own that lets in nobody but its user, and what a store makes of its restarts."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from gpufaas.errors import EtcdFailed
from scheduler.model.errors import DatastoreError
from scheduler.store.etcd_channel import EtcdChannel, EtcdSettings
from scheduler.store.etcd_store import EtcdStore
from tests.kit.engines.real_etcd import LOG, EtcdWorld, an_etcd, needs_etcd, patiently
from tests.kit.processes.scheduler_process import scheduler_process
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.etcd, needs_etcd, pytest.mark.group("guarded", seconds=60)]

# Passes run out this soon after their last use, and are looked at once a second.
SHORT_LIVED = ("--auth-token-ttl=1",)
RUN_OUT_S = 3.5


async def refused(settings: EtcdSettings) -> None:
    """Neither reading nor writing works."""
    store = EtcdStore(settings, LOG)
    try:
        with pytest.raises(DatastoreError):
            await store.get("a")
        with pytest.raises(DatastoreError):
            await store.put("a", b"a stranger's")
    finally:
        await store.close()


async def put(store: EtcdStore, key: str, value: bytes) -> None:
    """As soon as it can be done: a call takes 2 s at most, a busy machine may take longer."""
    await patiently(lambda: store.put(key, value))


async def kept(world: EtcdWorld, key: str) -> bytes | None:
    store = world.store()
    try:
        return await patiently(lambda: store.get(key))
    finally:
        await store.close()


async def test_a_stranger_is_refused_when_the_etcd_is_guarded(tmp_path: Path) -> None:
    data = tmp_path / "etcd"
    async with an_etcd(data, guarded=True) as world:
        async with world.store() as store:
            await patiently(lambda: store.put("a", b"1"))
        assert await kept(world, "a") == b"1"
        await refused(EtcdSettings((world.url,)))
        await refused(replace(world.settings(), password="guess"))
        assert (data / "password").stat().st_mode & 0o777 == 0o600
        assert data.stat().st_mode & 0o077 == 0
        assert not (data / "private:0").exists()


async def test_a_guarded_etcd_keeps_data_and_password_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    passwords = set()
    for expected in (None, b"1"):
        async with an_etcd(tmp_path, guarded=True) as world, world.store() as store:
            assert await kept(world, "a") == expected
            await put(store, "a", b"1")
            passwords.add(world.settings().password)
    assert len(passwords) == 1
    assert len(passwords.pop()) > 40


async def test_a_guarded_etcd_starts_when_its_folder_has_a_long_path(tmp_path: Path) -> None:
    async with an_etcd(tmp_path / ("long" * 40), guarded=True) as world:
        assert await kept(world, "a") is None
        await refused(EtcdSettings((world.url,)))


async def test_an_etcd_of_before_is_guarded_and_forgets_users_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    async with an_etcd(tmp_path) as world:
        async with world.store() as store:
            await put(store, "a", b"1")
        await intruders(world.url)
    async with an_etcd(tmp_path, guarded=True) as world:
        assert await kept(world, "a") == b"1"
        for name in ("eve", "root"):
            await refused(EtcdSettings((world.url,), user=name, password="a stranger's"))
        channel = EtcdChannel(world.settings(), LOG)
        request = rpc.AuthUserListRequest()
        answer = await channel.call("auth", "UserList", request, timeout_s=PATIENCE_S)
        assert list(answer.users) == ["root"]
        await channel.close()


async def intruders(url: str) -> None:
    """What anybody may do at an etcd that asks for nothing."""
    channel = EtcdChannel(EtcdSettings((url,)), LOG)
    for name in ("eve", "root"):
        user = rpc.AuthUserAddRequest(name=name, password="a stranger's")
        await channel.call("auth", "UserAdd", user, timeout_s=PATIENCE_S)
        role = rpc.AuthUserGrantRoleRequest(user=name, role="root")
        await channel.call("auth", "UserGrantRole", role, timeout_s=PATIENCE_S)
    await channel.close()


async def test_a_guarded_etcd_does_not_start_when_the_password_is_another_or_is_open_to_others(
    tmp_path: Path,
) -> None:
    async def start() -> None:
        async with an_etcd(tmp_path, guarded=True):
            pass

    await start()
    password = tmp_path / "password"
    password.chmod(0o644)
    with pytest.raises(EtcdFailed, match="chmod 600"):
        await start()
    password.chmod(0o600)
    password.write_text("another")
    with pytest.raises(EtcdFailed, match=r"password.*authenticate"):
        await start()
    password.write_text("\n")
    with pytest.raises(EtcdFailed, match="empty"):
        await start()


class Followed:
    """What a watch in the background brings."""

    def __init__(self, store: EtcdStore) -> None:
        self.values: dict[str, bytes | None] = {}
        self._task = asyncio.create_task(self._follow(store))

    async def _follow(self, store: EtcdStore) -> None:
        async with aclosing(store.watch("m/")) as found:
            async for changes in found:
                self.values.update(changes.values)

    async def brings(self, key: str, value: bytes) -> None:
        def is_there() -> bool:
            assert not self._task.done()
            return self.values.get(key) == value

        await eventually(is_there, f"{key} is {value!r}")

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.mark.parametrize("away_s", [0.0, 3.0], ids=["at once", "after a while"])
async def test_a_store_goes_on_when_a_guarded_etcd_is_killed_and_comes_back(
    tmp_path: Path, away_s: float
) -> None:
    """Its passes were in its memory: calls, watches and leases need new ones."""

    async with an_etcd(tmp_path, guarded=True) as world, world.store() as store:
        lease = await patiently(lambda: store.grant(300))
        await patiently(lambda: store.put("m/leased", b"1", lease))
        seen = Followed(store)
        await seen.brings("m/leased", b"1")
        await world.kill()
        await asyncio.sleep(away_s)
        await world.start()
        assert await patiently(lambda: store.refresh(lease))
        await put(store, "m/a", b"2")
        await seen.brings("m/a", b"2")
        await seen.end()
        await eventually(lambda: store.healthy, "the store is healthy")


@pytest.mark.parametrize("asked", ["get", "put", "refresh", "grant", "list"])
async def test_a_store_is_let_in_again_when_its_pass_has_run_out(
    tmp_path: Path, asked: str
) -> None:
    async with an_etcd(tmp_path, guarded=True, options=SHORT_LIVED) as world:
        store = world.store()  # without the heartbeat, which would keep the pass alive
        await put(store, "a", b"1")
        lease = await patiently(lambda: store.grant(60))
        await asyncio.sleep(RUN_OUT_S)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: store.get("a"),
            "put": lambda: store.put("a", b"2"),
            "refresh": lambda: store.refresh(lease),
            "grant": lambda: store.grant(60),
            "list": lambda: store.list(""),
        }
        assert await patiently(calls[asked])  # which fails where one is refused
        await store.close()


async def test_a_watch_is_let_in_again_when_a_pass_lives_no_longer_than_a_heartbeat(
    tmp_path: Path,
) -> None:
    async with (
        an_etcd(tmp_path, guarded=True, options=SHORT_LIVED) as world,
        world.store() as store,
    ):
        for number in range(3):
            seen = Followed(store)
            await put(store, f"m/{number}", b"1")
            await seen.brings(f"m/{number}", b"1")
            await asyncio.sleep(1.3)
            await eventually(lambda: store.healthy, "the store is healthy")
            await seen.end()


async def test_a_scheduler_with_an_etcd_of_its_own_is_let_in_and_a_stranger_is_not(
    tmp_path: Path,
) -> None:
    data = tmp_path / "etcd"
    (tmp_path / "gpufaas.toml").write_text(f'[etcd]\ndata_dir = "{data}"\n')
    async with scheduler_process(tmp_path, "--start-etcd") as scheduler:

        async def leads() -> bool:
            health = await asyncio.to_thread(readiness, scheduler.url)
            assert not health.startswith("lost")
            return health == "ok leads"

        await eventually(leads, "the scheduler leads")
        _, url = etcd_process(data)
        await refused(EtcdSettings((url,)))
        password = (data / "password").read_text().strip()
        store = EtcdStore(EtcdSettings((url,), user="root", password=password), LOG)
        assert await patiently(lambda: store.get("leader")) is not None
        await store.close()
        assert await scheduler.stop() == 0


async def test_a_scheduler_starts_its_etcd_again_when_it_was_killed(tmp_path: Path) -> None:
    data = tmp_path / "etcd"
    (tmp_path / "gpufaas.toml").write_text(f'[etcd]\ndata_dir = "{data}"\n')
    async with scheduler_process(tmp_path, "--start-etcd") as scheduler:

        async def is_kept() -> bool:
            return await asyncio.to_thread(readiness, scheduler.url) == "ok leads"

        await eventually(is_kept, "the scheduler leads")
        first, url = etcd_process(data)
        os.kill(first, signal.SIGKILL)

        async def is_another() -> bool:
            with suppress(LookupError):
                return first not in etcd_process(data)
            return False

        await eventually(is_another, "another etcd runs")
        assert etcd_process(data)[1] == url
        await eventually(is_kept, "the scheduler leads on with it")
        assert await scheduler.stop() == 0


def readiness(url: str) -> str:
    """What the scheduler says of its store, and whether it leads."""
    connection = HTTPConnection(url.partition("//")[2], timeout=PATIENCE_S)
    try:
        connection.request("GET", "/readyz")
        said = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return f"{said['store']} {'leads' if said['leading'] else 'waits'}"


def etcd_process(data: Path) -> tuple[int, str]:
    """The process of the etcd with these data, and where it answers."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            words = path.read_text(errors="replace").split("\0")
            if f"--data-dir={data / 'data'}" in words:
                named = "--listen-client-urls="
                url = next(each for each in words if each.startswith(named)).removeprefix(named)
                return int(path.parent.name), url
    raise LookupError("no etcd has these data")
