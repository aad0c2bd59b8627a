"""Scheduler processes: alone, on etcd, killed and taken over, with a node on a stream."""

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.time_limits import time_limit
from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.replay import replay
from gpufaas.stack.held_ports import HeldPort
from scheduler.model.actions import Demote
from scheduler.service.access import ApiRole, token
from scheduler.wire.node_stream import StreamTimes
from tests.kit.cores.builders import request
from tests.kit.engines.real_etcd import an_etcd, needs_etcd
from tests.kit.processes.scheduler_process import (
    SECRET,
    SchedulerProcess,
    scheduler_process,
)
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.worlds.cluster_in_process import a_node, attached

pytestmark = pytest.mark.timeout(180, func_only=True)

TIMES = StreamTimes()
CALLER = token(SECRET, ApiRole.CALLER)


def patient_options(folder: Path, etcd_url: str) -> tuple[str, ...]:
    """Of schedulers whose callers wait until the node has found the new leader."""
    config = folder / "patient.toml"
    config.write_text(f"[scheduler]\nattach_grace_s = {PATIENCE_S}\n")
    return ("--etcd", etcd_url, "--config", str(config))


def ask(scheduler: SchedulerProcess, *words: str) -> list[str]:
    return [*words, "--scheduler", scheduler.url, "--secret-file", str(scheduler.secret_file)]


async def test_commands_show_and_change_a_running_scheduler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def said(scheduler: SchedulerProcess, *words: str) -> str:
        assert await asyncio.to_thread(main, ask(scheduler, *words)) == 0
        return capsys.readouterr().out

    node = a_node("n0")
    async with (
        scheduler_process(tmp_path, "--policy", "lb", "--record", "run.jsonl") as it,
        attached(node, it.url, secret=SECRET, times=TIMES),
        it.client() as client,
    ):
        granted = await client.acquire(request("r0"))
        assert "n0.0" in await said(it, "status", "--once")
        assert json.loads(await said(it, "status", "--json"))["misses"] == 1
        assert await said(it, "policy", "get") == "lb\n"
        assert await said(it, "policy", "set", "lalbo3", "o3_limit=3") == "lalbo3 o3_limit=3\n"
        assert "netgain" in await said(it, "policy", "list")
        client.release(granted.placement.lease)
        await eventually(lambda: not node.leases, "the node has no lease")
        assert "n0.0" in await said(it, "models")
        assert await said(it, "pin", "bert") == "pin: bert\n"
        assert "n0.0*" in await said(it, "models")
        story = await said(it, "explain", "r0")
        assert "completed" in story
        assert "<- chosen" in story
        assert (await said(it, "explain")).split()[-2:] == ["function-of-r0", "r0"]
        assert await asyncio.to_thread(main, ask(it, "evict", "bert")) == EXIT_BAD_USE
        assert "pinned on n0.0" in capsys.readouterr().err
        assert await it.stop() == 0
    assert node.wrong == []
    found = replay(tmp_path / "run.jsonl")
    assert (found.terms, found.differing_lines) == (1, [])
    assert found.by_kind["PolicySet"] == found.by_kind["RequestArrived"] == 1


@pytest.mark.etcd
@needs_etcd
async def test_standby_takes_over_when_the_leader_is_killed(tmp_path: Path) -> None:
    """Callers and the node find the new leader by themselves; what is resident stays."""
    node = a_node("n0", gpus=2)
    async with an_etcd(tmp_path / "etcd") as etcd:
        options = patient_options(tmp_path, etcd.url)
        async with (
            scheduler_process(tmp_path, *options) as first,
            scheduler_process(tmp_path, *options) as second,
            attached(node, first.url, second.url, secret=SECRET, times=TIMES),
            second.client(first.url) as client,
        ):
            before = await client.acquire(request("r0"))
            client.release(before.placement.lease)
            await eventually(lambda: not node.leases, "the node has no lease")
            await first.kill()
            killed_s = asyncio.get_running_loop().time()
            after = await client.acquire(request("r1"))
            took_s = asyncio.get_running_loop().time() - killed_s
            logging.getLogger(__name__).info("taken over after %.1f s", took_s)
            assert after.term > before.term
            assert after.placement.lease > before.placement.lease
            assert (after.placement.hit, after.placement.gpu) == (True, before.placement.gpu)
            client.release(after.placement.lease)
    assert node.wrong == []


@pytest.mark.etcd
@needs_etcd
async def test_standby_takes_over_when_the_leader_is_frozen(tmp_path: Path) -> None:
    """Its waiting callers are served by the other one; thawed, it follows the other one."""
    node = a_node("n0")
    async with an_etcd(tmp_path / "etcd") as etcd:
        options = patient_options(tmp_path, etcd.url)
        async with (
            scheduler_process(tmp_path, *options) as first,
            scheduler_process(tmp_path, *options) as second,
            attached(node, first.url, second.url, secret=SECRET, times=TIMES),
            first.client(second.url) as client,
        ):
            before = await client.acquire(request("r0"))
            waiting = asyncio.create_task(client.acquire(request("r1")))
            await eventually(partial(waiting_at, first), "the leader has the request")
            assert not waiting.done()
            first.freeze()
            client.release(before.placement.lease)
            after = await waiting
            assert after.term > before.term
            assert after.placement.lease > before.placement.lease
            first.thaw()
            async with first.client() as late:
                async with time_limit(30):
                    late.release(after.placement.lease)
                    again = await late.acquire(request("r2"))
                assert again.term == after.term
                late.release(again.placement.lease)
            await eventually(lambda: not node.leases, "the node has no lease")
    assert node.wrong == []


@pytest.mark.etcd
@needs_etcd
async def test_restarted_scheduler_keeps_policy_profiles_and_residents(tmp_path: Path) -> None:
    node, port = a_node("n0"), HeldPort().keep()
    async with an_etcd(tmp_path / "etcd") as etcd:
        options = patient_options(tmp_path, etcd.url)
        async with AsyncExitStack() as stack:
            async with scheduler_process(tmp_path, *options, port=port) as first:
                at_both = attached(node, first.url, secret=SECRET, times=TIMES)
                await stack.enter_async_context(at_both)
                async with first.client() as client:
                    granted = await client.acquire(request("r0"))
                    client.release(granted.placement.lease)
                    await eventually(lambda: not node.leases, "the node has no lease")
                assert (await shown(first, "policy", "set", "lb"))["policy"] == "lb"
                assert await first.stop() == 0
            async with (
                scheduler_process(tmp_path, *options, port=port) as second,
                second.client() as client,
            ):
                again = await client.acquire(request("r1"))
                assert again.placement.hit
                assert (await shown(second, "policy", "get"))["policy"] == "lb"
                (model,) = await shown(second, "models")
                assert model["load_s"] == {"absent": 0.0}
    assert node.wrong == []
    assert node.given(Demote) == []


@pytest.mark.etcd
@needs_etcd
async def test_scheduler_serves_from_memory_when_etcd_is_gone(tmp_path: Path) -> None:
    node = a_node("n0")
    async with (
        an_etcd(tmp_path / "etcd") as etcd,
        scheduler_process(tmp_path, "--etcd", etcd.url) as it,
        attached(node, it.url, secret=SECRET, times=TIMES),
        it.client() as client,
    ):
        granted = await client.acquire(request("r0"))
        client.release(granted.placement.lease)
        await etcd.kill()
        await readiness(it, "lost")
        granted = await client.acquire(request("r1"))
        client.release(granted.placement.lease)
        words = ask(it, "policy", "set", "lb")
        assert await asyncio.to_thread(main, words) == EXIT_BAD_USE
        await etcd.start()
        await readiness(it, "ok")
        assert (await shown(it, "policy", "set", "lb"))["policy"] == "lb"


async def shown(scheduler: SchedulerProcess, *words: str) -> Any:
    """What a command prints as JSON, run as a process."""
    command = (sys.executable, "-m", "gpufaas", *ask(scheduler, *words), "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    said, _ = await process.communicate()
    return json.loads(said)


async def waiting_at(scheduler: SchedulerProcess) -> int:
    """How many requests wait there."""
    url, headers = f"{scheduler.url}/cluster", {"Authorization": f"Bearer {CALLER}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        found: int = (await answer.json())["waiting"]
        return found


async def readiness(scheduler: SchedulerProcess, store: str) -> None:
    """Wait until the scheduler says this of its datastore; it is ready all the while."""

    async def is_said() -> bool:
        async with session.get(f"{scheduler.url}/readyz") as answer:
            assert answer.status == 200
            return bool((await answer.json())["store"] == store)

    async with aiohttp.ClientSession() as session:
        await eventually(is_said, f"its datastore is {store}")
