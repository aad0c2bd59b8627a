"""The parts that simulations are made of: programs, the network, etcd and the disk of a queue."""

import asyncio
import sqlite3
from contextlib import aclosing
from functools import partial
from random import Random
from typing import Any

import pytest

from common.time_limits import time_limit_at
from gateway_ext.errors import QueueDiskFull
from gateway_ext.jobs.sqlite.committer import Transaction
from scheduler.model.errors import StoreUnavailable
from tests.kit.simulation.job_disk import JobDisk
from tests.kit.simulation.simulated_etcd import EtcdClient, SimulatedEtcd
from tests.kit.simulation.simulated_stage import Stage


def test_a_frozen_program_does_what_fell_due_when_it_is_thawed() -> None:
    stage = Stage()

    async def tick() -> None:
        for number in range(4):
            await asyncio.sleep(1.0)
            stage.note(f"{number}")

    async def course() -> None:
        stage.one.start(tick())
        await asyncio.sleep(1.5)
        stage.one.freeze()
        await asyncio.sleep(5.0)
        stage.one.thaw()
        await asyncio.sleep(5.0)

    stage.play(course())
    assert stage.noted == [(1.0, "0"), (6.5, "1"), (7.5, "2"), (8.5, "3")]


def test_a_killed_program_does_nothing_and_its_connections_end() -> None:
    stage = Stage()

    async def course() -> None:
        stage.other.start(stage.listen())
        await asyncio.sleep(0.1)
        stage.one.start(stage.send())
        await asyncio.sleep(2.5)
        stage.one.kill()
        await asyncio.sleep(5.0)

    stage.play(course())
    assert stage.texts() == ["0", "1", "2", "broken"]


def test_what_a_silent_link_swallowed_comes_in_order_when_it_is_healed() -> None:
    stage = Stage()

    async def course() -> None:
        stage.other.start(stage.listen())
        await asyncio.sleep(0.1)
        stage.one.start(stage.send())
        await asyncio.sleep(0.5)
        stage.network.block("one", "other")
        await asyncio.sleep(3.0)
        assert stage.texts() == ["0"]
        stage.network.heal("one", "other")
        await asyncio.sleep(3.0)

    stage.play(course())
    assert stage.noted == [(0.1, "0"), (3.6, "1"), (3.6, "2"), (3.6, "3"), (4.1, "4")]


def test_a_reset_connection_breaks_at_both_ends() -> None:
    stage = Stage()

    async def course() -> None:
        stage.other.start(stage.listen())
        await asyncio.sleep(0.1)
        stage.one.start(stage.send())
        await asyncio.sleep(1.5)
        stage.network.reset("other", "one")
        await asyncio.sleep(3.0)

    stage.play(course())
    assert stage.texts() == ["0", "1", "broken"]


def test_every_program_has_a_monotonic_clock_of_its_own() -> None:
    stage = Stage()

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with time_limit_at(began_s + 3.0):
            await asyncio.sleep(2.0)
        stage.note(f"{began_s:.0f} {loop.time() - began_s:.1f}")

    async def course() -> None:
        stage.one.start(wait())
        stage.other.start(wait())
        await asyncio.sleep(5.0)

    stage.play(course())
    assert stage.noted == [(2.0, "1000000 2.0"), (2.0, "5 2.0")]


def test_etcd_that_does_not_answer_may_have_written_and_forgets_only_when_it_is_wiped() -> None:
    stage = Stage()
    etcd = SimulatedEtcd(stage.network, "other")

    async def use() -> None:
        client = EtcdClient(etcd, "one")
        await client.put("key", b"1")
        stage.network.block("other", "one")
        try:
            await client.put("key", b"2")
        except StoreUnavailable:
            stage.note("unknown")
        stage.network.heal("other", "one")
        stage.note(f"{await client.get('key')!r}")
        async with aclosing(client.watch("")) as found:
            stage.note(f"{dict((await anext(found)).values)}")
            await etcd.wipe()
            stage.note(f"{dict((await anext(found)).values)}")

    async def course() -> None:
        stage.one.start(use())
        await asyncio.sleep(20.0)

    stage.play(course())
    assert stage.texts()[0] == "unknown"
    assert stage.texts()[1] in ("b'1'", "b'2'")
    assert stage.texts()[3] == "{}"


def test_a_disk_keeps_what_was_synced_and_takes_nothing_while_it_is_full() -> None:
    disk = JobDisk(Random(1))

    def execute(sql: str, turn: Transaction) -> list[Any]:
        return turn.db.execute(sql).fetchall()

    def count() -> object:
        return disk.commit(partial(execute, "SELECT count(*) FROM t"), durable=False)[0][0]

    disk.commit(partial(execute, "CREATE TABLE t (n INTEGER)"), durable=True)
    disk.commit(partial(execute, "INSERT INTO t VALUES (1)"), durable=True)
    disk.commit(partial(execute, "INSERT INTO t VALUES (2)"), durable=False)
    assert count() == 2
    disk.lose_power()
    assert count() == 1
    disk.full = True
    with pytest.raises(QueueDiskFull):
        disk.commit(partial(execute, "INSERT INTO t VALUES (3)"), durable=True)
    assert count() == 1
    disk.close()
    with pytest.raises(sqlite3.ProgrammingError):
        count()
