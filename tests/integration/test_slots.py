"""A GPU announced as seven slots, live: shares of its speed, leases at once, configurations."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from cache_manager import eviction
from common.telemetry.metrics import Values
from gpu_manager.node.leases import LeaseTimes
from gpu_manager.node.settings import EmulatedTimes
from gpu_manager.worker.orders import LeaseTerms
from gpufaas import embedded_node
from gpufaas.embedded_node import EmbeddedNode
from scheduler.cluster.view import View
from scheduler.composition import compose
from scheduler.core.core import Core
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import Decision, Place
from tests.kit.nodes.manager_client import SealedWeights, model
from tests.kit.nodes.node_thread import NodeThread, holder_of_first_slot, node_thread
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.waiting import wait_until
from torch_shim.errors import WireError

SLOTS, RUN_S = 7, 0.03


@dataclass(frozen=True)
class FixedSlots:
    """Every lease gets so many slots of the only GPU, and this configuration."""

    slots: int
    configuration: Configuration | None = None

    def decide(self, view: View) -> Iterator[Decision]:
        while len(idle := list(view.idle_slots())) >= self.slots:
            head = view.head(idle[0])
            if head is None:
                return
            more = idle[1 : self.slots]
            yield Place((head,), idle[0], "so many", self.configuration, more)


@contextmanager
def divided(
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    configuration: Configuration | None = None,
    run_s: float = RUN_S,
    **more: Any,
) -> Iterator[NodeThread]:
    """A node whose scheduler gives every lease so many slots."""

    def core(_: str, rule: str) -> Core:
        return compose(FixedSlots(slots, configuration), eviction.make(rule))

    monkeypatch.setattr(embedded_node, "make_core", core)
    with node_thread(
        gpu_slots=SLOTS, gpu_vcpus=8, emulation=EmulatedTimes(run_s=run_s), **more
    ) as node:
        yield node


def client_of(node: NodeThread, image: SealedWeights) -> FunctionClient:
    """A function with a lease of its own."""
    client = FunctionClient(node.address, node.credential())
    client.upload(image)
    client.acquire(image)
    return client


def leave(client: FunctionClient) -> None:
    client.release()
    client.close()


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_a_run_takes_longer_in_proportion_when_its_lease_has_fewer_slots(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """The time that the node reports, which is the emulated one where computing takes less."""
    image = model(1.0)
    with divided(monkeypatch, slots) as node:
        client = client_of(node, image)
        for _ in range(3):
            begin_s = time.monotonic()
            assert client.call(image) == [2.0] * 4
            assert time.monotonic() - begin_s >= RUN_S * SLOTS / slots
        leave(client)
        wait_until(lambda: node.run(run_seconds), "the runs are counted")
        assert node.run(run_seconds) >= 0.99 * RUN_S * SLOTS / slots
    image.close()


def run_seconds(node: EmbeddedNode) -> float:
    """The mean of all runs, as the node counts them."""
    found = {each.metric.name: each for each in node.manager.node.meters.families()}
    runs, spent = found["gpufaas_node_gpu_runs_total"], found["gpufaas_node_gpu_run_seconds_total"]
    assert isinstance(runs, Values)
    assert isinstance(spent, Values)
    number = sum(runs.values.values())
    return sum(spent.values.values()) / number if number else 0.0


@pytest.mark.parametrize("same_model", [True, False])
def test_leases_on_other_slots_run_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, *, same_model: bool
) -> None:
    images = [model(1.0)] * 3 if same_model else [model(1.0), model(2.0), model(3.0)]
    run_s = 4.0 / SLOTS * 2  # two slots of seven: four seconds
    with divided(monkeypatch, 2, run_s=run_s) as node:
        clients = [client_of(node, image) for image in images]
        assert node.leases() == 3
        spans: list[tuple[float, float]] = []

        def call(number: int) -> None:
            begin_s = time.monotonic()
            clients[number].call(images[number])
            spans.append((begin_s, time.monotonic()))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(end_s - begin_s >= 4.0 for begin_s, end_s in spans)
        whole_s = max(end_s for _, end_s in spans) - min(begin_s for begin_s, _ in spans)
        assert whole_s < 3 * 4.0  # what they take one after the other
        for client in clients:
            leave(client)
    for image in {id(image): image for image in images}.values():
        image.close()


def test_no_more_leases_than_slots_are_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    image = model(1.0)
    with divided(monkeypatch, 3, leases=LeaseTimes(quiet_s=60.0, quantum_s=60.0)) as node:
        clients = [client_of(node, image) for _ in range(2)]
        last = FunctionClient(node.address, node.credential())
        waiting = threading.Thread(target=last.acquire, args=(image,))
        waiting.start()
        wait_until(lambda: node.run(lambda it: it.status().waiting) == 1, "the last one waits")
        leave(clients[0])
        waiting.join()
        assert last.call(image) == [2.0] * 4
        leave(last)
        leave(clients[1])
    image.close()


def test_a_lease_says_how_many_of_its_calls_run_as_one_and_with_how_many_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = model(1.0)
    with divided(monkeypatch, 2, Configuration(4, 3, 2)) as node:
        client = client_of(node, image)
        terms = node.run(granted)
        assert terms == [LeaseTerms((0, 1), SLOTS, 4, 3)]
        leave(client)
    image.close()


def granted(node: EmbeddedNode) -> list[LeaseTerms]:
    """The terms of all leases in force."""
    leases, gpus = node.manager.node.leases, node.manager.node.gpus
    return [lease.terms(gpus[lease.gpu].spec) for lease in leases]


def test_a_worker_that_dies_frees_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    image, other = model(1.0), model(2.0)
    with divided(monkeypatch, 3, run_s=60.0) as node:
        client = client_of(node, image)

        def fail() -> None:
            with pytest.raises(WireError):
                client.call(image)

        calling = threading.Thread(target=fail)
        calling.start()
        (pid,) = node.pids()
        wait_until(lambda: node.run(holder_of_first_slot) == pid, "it runs on its slots")
        os.kill(pid, signal.SIGKILL)
        calling.join()
        wait_until(lambda: node.run(holder_of_first_slot) is None, "the slots are free")
        wait_until(lambda: not node.leases(), "the lease has ended")
        second = client_of(node, other)
        assert [len(terms.slots) for terms in node.run(granted)] == [3]
        leave(second)
        client.close()
    image.close()
    other.close()
