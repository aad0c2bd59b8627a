"""Functions that compute on a node that is not their own: real managers, workers and torch."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.model.ids import ModelId
from gpu_manager.credentials import load_secret
from gpufaas.stack.held_ports import HeldPort
from scheduler.model.values import Request, RequestId
from scheduler.service.access import ApiRole, token
from scheduler.wire.caller_stream import Granted
from tests.kit.network.certificates import self_signed
from tests.kit.nodes.manager_client import model
from tests.kit.processes.two_nodes import TwoNodes
from tests.kit.waiting import eventually, wait_until
from tests.kit.worlds.waiting_caller import WaitingCaller

pytestmark = pytest.mark.group("two_nodes", seconds=100)

# Less than the program's model needs, also once its need is measured.
TOO_SMALL = "300KiB"
# Computes a line of numbers for every line that it hears, and says which lease it computed under.
PROGRAM = """
import sys, threading, torch
from torch_shim.leases import leasing
used, nodes = threading.local(), {}
lease_for = leasing.ProcessLeases.lease_for
def noted(self, batch, bring):
    found = lease_for(self, batch, bring)
    session = found.lease.session
    if session.connected:
        nodes[session] = session.node
    used.last = nodes[session], found.lease.number
    return found
leasing.ProcessLeases.lease_for = noted

torch.manual_seed(0)
here = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
x = torch.arange(512.0).reshape(2, 256) / 512
with torch.no_grad():
    expected = here(x)
    there = here.cuda()

def compute():
    with torch.no_grad():
        answer = there(x.cuda()).cpu()
    assert torch.allclose(answer, expected, atol=1e-5), (answer, expected)
    return used.last
"""
BY_ITSELF = (
    PROGRAM
    + """
for line in sys.stdin:
    try:
        print(*compute(), flush=True)
    except RuntimeError as error:
        print(error, flush=True)
"""
)
AS_TOLD = (
    PROGRAM
    + """
import json
from concurrent.futures import ThreadPoolExecutor
from torch_shim.leases import request_context as placement
pool = ThreadPoolExecutor(2)
def serve(headers):
    with placement.given(*headers):
        return compute()
for line in sys.stdin:
    print(json.dumps(list(pool.map(serve, json.loads(line)))), flush=True)
"""
)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    """Its scheduler has the usual options, unless a test names others."""
    with TwoNodes(tmp_path) as found:
        found.scheduler(*getattr(request, "param", ()))
        yield found


@pytest.mark.parametrize("wire", ["tls", "unix"])
def test_function_computes_on_another_node_when_its_own_is_too_small(
    cluster: TwoNodes, wire: str
) -> None:
    own = f"unix:{cluster.folder / 'own.sock'}"
    site = f"127.0.0.1:{HeldPort().keep()}"
    there = f"{wire}:{cluster.folder / 'b.sock' if wire == 'unix' else site}"
    secured = []
    if wire == "tls":
        certificate, key = self_signed(cluster.folder)
        secured = ["--certificate", str(certificate), "--key", str(key)]
    cluster.node("own", own, memory=TOO_SMALL)
    other = cluster.node("other", there, *secured)
    program = cluster.program(BY_ITSELF, own)

    assert program.ask().startswith("other ")
    assert program.ask().startswith("other ")

    other.kill()
    program.say()  # no other GPU will do: it waits
    cluster.node("other", there, *secured)
    assert program.hear().startswith("other ")


def test_call_fails_with_the_nodes_name_when_nobody_answers_there(cluster: TwoNodes) -> None:
    own = f"unix:{cluster.folder / 'own.sock'}"
    cluster.node("own", own, memory=TOO_SMALL)
    nowhere = f"tcp:127.0.0.1:{HeldPort().keep()}"
    hidden = f"unix:{cluster.folder / 'other.sock'}"
    cluster.node("other", hidden, "--advertise", nowhere)
    program = cluster.program(BY_ITSELF, own)

    complaint = program.ask()

    lost = "the lease that the scheduler granted on node other is unusable: "
    assert complaint.startswith(f"CUDA error: worker lost: {lost}")
    assert nowhere in complaint
    wait_until(lambda: not cluster.gpus()["other"]["slots"][0]["leases"], "no lease is left")


def test_function_computes_at_home_again_when_the_other_node_is_killed(cluster: TwoNodes) -> None:
    own, other = f"unix:{cluster.folder / 'own.sock'}", f"tcp:127.0.0.1:{HeldPort().keep()}"
    cluster.node("own", own)
    busy = cluster.function(own)
    image = model(7.0)
    busy.upload(image)
    busy.acquire(image)
    killed = cluster.node("other", other)
    program = cluster.program(BY_ITSELF, own)

    assert program.ask().startswith("other ")
    busy.close()
    killed.kill()

    assert program.ask().startswith("own ")
    image.close()


# A policy of hits may have both wait for one GPU, where a busy machine has made the load slow.
@pytest.mark.parametrize("cluster", [("--policy", "lb")], indirect=True)
async def test_each_request_uses_its_own_lease_when_two_are_given_at_once(
    cluster: TwoNodes,
) -> None:
    own, other = f"unix:{cluster.folder / 'own.sock'}", f"tcp:127.0.0.1:{HeldPort().keep()}"
    cluster.node("own", own)
    cluster.node("other", other)
    program = cluster.program(AS_TOLD, own)
    first = json.loads(program.ask("[[null, null]]"))
    (name,) = cluster.gpus()[first[0][0]]["residents"]
    found = ModelId(name["model"])

    async with calling(cluster) as client:  # its leases end with it
        granted = await placed(client, found)
        assert {it.placement.node for it in granted} == {"own", "other"}
        headers = [[",".join(it.addresses), it.token] for it in granted]
        used = json.loads(program.ask(json.dumps(headers)))

        assert used == [[it.placement.node, it.placement.lease] for it in granted]

        # Once these have ended, the requests ask by themselves.
        for it in granted:
            client.release(it.placement.lease)
        await ended(cluster, granted)
    again = json.loads(program.ask(json.dumps(headers)))
    assert {lease for _, lease in again}.isdisjoint(it.placement.lease for it in granted)


def calling(cluster: TwoNodes) -> WaitingCaller:
    """The scheduler, as a gateway talks to it."""
    return WaitingCaller([cluster.url], token(load_secret(cluster.secret), ApiRole.CALLER))


async def placed(client: WaitingCaller, wanted: ModelId) -> list[Granted]:
    """Leases for two requests of the program's at once."""
    wishes = [Request(RequestId(name), "team/program", (wanted,)) for name in ("r1", "r2")]
    return list(await asyncio.gather(*map(client.acquire, wishes)))


async def ended(cluster: TwoNodes, granted: list[Granted]) -> None:
    """Wait until these leases have ended."""
    leases = {it.placement.lease for it in granted}

    def in_force() -> set[int]:
        slots = (slot for gpu in cluster.gpus().values() for slot in gpu["slots"])
        return {lease["id"] for slot in slots for lease in slot["leases"]}

    await eventually(lambda: not leases & in_force(), "the leases end")
