"""Two instances of a function that share one lease of several slots, live, under esg."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_manager.credentials import load_secret
from gpu_manager.node.settings import EmulatedTimes
from gpu_manager.node.tenant_models import model_id
from scheduler.model.events import ModelRegistered
from scheduler.model.values import ModelSpec, Placement, Request, RequestId
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens
from tests.kit.nodes.manager_client import SealedWeights, model
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.waiting import wait_until
from torch_shim.errors import WireError

NAMES = "gateway/1", "gateway/2"
FUNCTION = "team/function"
# On one slot two take too long; on two slots they take as long as one, with half of the vCPUs.
# All of it is so long that it does not matter how long the requests are held up.
SLO_S, RUN_S = 250.0, ((1, "any", 100.0), (2, "any", 400.0))
# The first request waits for the second one.
FILLING = {"most_batch": 2.0, "fill_share": 0.05}
CALLS = 10


@dataclass
class Shared:
    """The lease, and an instance for each of its two requests."""

    node: NodeThread
    image: SealedWeights
    placement: Placement
    clients: Sequence[FunctionClient]

    def in_force(self) -> bool:
        return (
            self.node.run(lambda it: it.manager.node.leases.get(self.placement.lease)) is not None
        )

    def requests(self) -> int:
        """How many of the requests have not ended."""
        counts = self.node.run(lambda it: it.status()).counts.finished
        return len(NAMES) - sum(counts.values())

    def ends(self, name: str) -> None:
        """The call of this request has been answered: its caller gives the lease back."""
        self.node.run(lambda it: it.driver.release(self.placement.lease, RequestId(name)))


@contextmanager
def shared(folder: Path) -> Iterator[Shared]:
    secret_file, image = folder / "secret", model(1.0)
    emulation = EmulatedTimes(run_s=0.01)
    with node_thread(
        policy="esg", gpu_slots=4, gpu_vcpus=8, secret_file=secret_file, emulation=emulation
    ) as node:
        clients = [FunctionClient(node.address, node.credential()) for _ in NAMES]
        clients[0].upload(image)
        name = model_id("team", image.digest)
        node.run(lambda it: it.driver.report(ModelRegistered(ModelSpec(name, run_s=RUN_S))))

        async def acquire() -> list[Placement]:
            driver, now_s = node.node.driver, asyncio.get_running_loop().time()
            await driver.set_policy("esg", FILLING)
            asked = [
                Request(RequestId(each), FUNCTION, (name,), slo_s=SLO_S, arrived_s=now_s)
                for each in NAMES
            ]
            return await asyncio.gather(*map(driver.acquire, asked))

        one, two = node.do(acquire())
        assert one == two
        for client, each in zip(clients, NAMES, strict=True):
            client.acquire(image, token=token(one, each, load_secret(secret_file)))
        yield Shared(node, image, one, clients)
        for client in clients:
            client.close()
    image.close()


def token(placement: Placement, request: str, secret: bytes) -> str:
    """What a gateway passes on to the function."""
    place = placement.node, placement.gpu, placement.slot
    until_s = time.time() + 300.0
    claims = LeaseClaims(placement.lease, RequestId(request), FUNCTION, *place, 1, until_s)
    return LeaseTokens(secret).sign(claims)


def call_together(it: Shared) -> list[list[list[float]]]:
    """What each instance gets for its own numbers, while the other one calls too."""
    answers: list[list[list[float]]] = [[] for _ in it.clients]

    def call(number: int) -> None:
        client = it.clients[number]
        answers[number] = [client.call(it.image, x=10.0 * number + each) for each in range(CALLS)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(it.clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_two_instances_share_a_lease_of_two_slots_and_each_has_its_own_end(tmp_path: Path) -> None:
    with shared(tmp_path) as it:
        held = it.node.run(lambda node: node.manager.node.leases.get(it.placement.lease))
        assert held is not None
        assert (len(held.live.more_slots), held.report().requests) == (1, NAMES)
        assert call_together(it) == [
            [[10.0 * number + each + 1.0] * 4 for each in range(CALLS)] for number in range(2)
        ]
        it.ends(NAMES[0])
        assert it.requests() == 1
        assert it.clients[1].call(it.image, x=5.0) == [6.0] * 4
        assert it.in_force()
        it.ends(NAMES[1])
        wait_until(lambda: not it.in_force(), "the lease ends with its last request")
        assert it.requests() == 0


def test_instance_that_dies_leaves_the_lease_to_the_other_one(tmp_path: Path) -> None:
    with shared(tmp_path) as it:
        assert it.clients[0].call(it.image) == [2.0] * 4
        it.clients[0].close()
        wait_until(lambda: it.requests() == 1, "its request has ended")
        assert it.clients[1].call(it.image, x=5.0) == [6.0] * 4
        it.clients[1].release(NAMES[1])
        wait_until(lambda: not it.in_force(), "the lease ends with its last request")


def test_both_instances_get_other_leases_when_their_worker_dies(tmp_path: Path) -> None:
    with shared(tmp_path) as it:
        assert call_together(it)
        (worker,) = it.node.pids()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not it.in_force(), "the lease ends with its worker")
        for number, client in enumerate(it.clients):
            with pytest.raises(WireError):
                client.call(it.image)
            assert client.use(it.image, x=float(number)) == [number + 1.0] * 4
