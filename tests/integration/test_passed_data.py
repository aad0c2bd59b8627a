"""Data between functions in processes of their own: real managers, workers and torch."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from urllib.error import HTTPError

import pytest

from gpufaas.stack.held_ports import HeldPort
from tests.kit.network.certificates import self_signed
from tests.kit.places import ACTIVATE, ROOT
from tests.kit.processes.runtime_process import runtime
from tests.kit.processes.two_nodes import TwoNodes
from tests.kit.programs.data_functions import (
    DataFunction,
    SharedNode,
    data_function,
    kill_workers,
    one_node,
    open_data,
    shared_node,
)
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.group("passed_data", seconds=200)

GONE = "DataUnavailable: there is no such data"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TwoNodes]:
    """One of a test's own."""
    with TwoNodes(tmp_path) as found:
        found.scheduler()
        yield found


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], SharedNode]]:
    """Nodes by their runtimes, each made when it is needed."""
    with ExitStack() as stack:

        @cache
        def node_of(runtime: str) -> SharedNode:
            folder = tmp_path_factory.mktemp("t")
            return stack.enter_context(shared_node(folder, "--runtime", runtime))

        yield node_of


@pytest.fixture
def node(
    nodes: Callable[[str], SharedNode], request: pytest.FixtureRequest
) -> Iterator[SharedNode]:
    """A node whose models have a process each, or that of the runtime that a test names."""
    found = nodes(getattr(request, "param", "process"))
    yield found
    found.clear()


@pytest.mark.parametrize("node", ["process", "stream"], indirect=True)
def test_result_is_used_by_another_function_and_its_bytes_do_not_cross(
    node: SharedNode,
) -> None:
    one, other = node.function("one"), node.function("other")
    one.do("kept['x'] = there.cuda()", "double(kept['x'])")
    other.do("triple(there.cuda())")

    before = one.say("bytes_moved()")
    handle = one.put("double(kept['x'])")
    assert one.say("bytes_moved()") == before
    before = other.say("bytes_moved()")
    other.do(f"kept['y'] = get({handle!r})", "kept['z'] = triple(kept['y'])")
    assert other.say("bytes_moved()") == before
    assert not open_data(node.manager)  # the workers have it, the manager does not
    one.do(f"drop({handle!r})", "kept.clear()", "settle()")
    other.do("kept['z'] = triple(kept['y'])")  # who has taken it has it
    assert other.say("torch.equal(kept['z'].cpu(), there * 6)") is True
    assert other.say("str(kept['y'].device)") == "cuda:0"
    handle = one.put("double(there.cuda())")
    other.do(f"kept['y'] = get({handle!r})")
    assert other.say("torch.equal(kept['y'].cpu(), there * 2)") is True


@pytest.mark.parametrize("node", ["process", "stream"], indirect=True)
def test_nobody_sees_what_others_write_to_their_tensor(node: SharedNode) -> None:
    one, other = node.function("one"), node.function("other")
    one.do("kept['x'] = double(there.cuda())")
    other.do("grow(there.cuda())", "triple(there.cuda())")
    handle = one.put("kept['x']")
    other.do(f"kept['a'] = get({handle!r})", f"kept['b'] = get({handle!r})")
    total = "float((there * 2 + 1).sum())"
    assert other.say(f"abs(grow(kept['a']).item() / {total} - 1) < 1e-5") is True
    assert other.say("torch.equal(kept['a'].cpu(), there * 2 + 1)") is True
    one.do("grow(kept['x'])", "kept['x'].mul_(5)")
    assert other.say("torch.equal(triple(kept['b']).cpu(), there * 6)") is True
    assert other.say(f"torch.equal(get({handle!r}).cpu(), there * 2)") is True


def test_data_that_a_worker_was_given_alone_is_found_and_dropped_at_once(
    node: SharedNode,
) -> None:
    one, other = node.function("one"), node.function("other")
    one.do("kept['x'] = double(there.cuda())")
    one.put("kept['x']")  # asks the manager, who lets the worker do the next ones
    assert one.say("[drop(put(kept['x'])) for _ in range(20)] == [None] * 20") is True
    for number in range(5):
        handle = one.put("kept['x']")
        assert other.say(f"torch.equal(get({handle!r}).cpu(), there * 2)") is True, number
        one.do(f"drop({handle!r})")
        wait_until(partial(is_gone, other, handle), "it was dropped")
    handle = one.put("[kept['x'], 1]")  # of which one part is the worker's
    assert other.say(f"torch.equal(get({handle!r})[0].cpu(), there * 2)") is True
    brief = one.put("kept['x'], 0.05")
    wait_until(partial(is_gone, other, brief), "its time is over")


def is_gone(reader: DataFunction, handle: str) -> bool:
    return str(reader.say(f"type(get({handle!r})).__name__")).startswith(GONE)


def test_values_of_all_kinds_come_as_they_were_put(node: SharedNode) -> None:
    one, other = node.function("one"), node.function("other")
    one.do("kept['y'] = double(there.cuda())")
    handle = one.put("{'y': kept['y'], 'cpu': there, 'b': b'abc', 'n': [1, (2.5, None, 'x')]}")
    other.do(f"kept['v'] = get({handle!r})")
    assert other.say("torch.equal(kept['v']['y'].cpu(), there * 2)") is True
    assert other.say("type(kept['v']['cpu']) is torch.Tensor") is True
    assert other.say("torch.equal(kept['v']['cpu'], there)") is True
    assert other.say("bytes(kept['v']['b']).decode()") == "abc"
    assert other.say("kept['v']['n'] == [1, (2.5, None, 'x')]") is True
    one.do(f"drop({handle!r})")
    assert str(other.say(f"get({handle!r})")).startswith(GONE)
    assert str(one.say("put(object())")).startswith("UnsuitableData: the value cannot be put")


def test_handles_of_others_forged_or_over_are_all_the_same(node: SharedNode) -> None:
    one, stranger = node.function("one"), node.function("one", "strangers")
    handle, staying = one.put("b'secret'"), one.put("double(there.cuda())")
    brief = one.put("b'brief', 0.05")
    time.sleep(0.1)
    texts = {
        stranger.say(f"get({handle!r})"),
        stranger.say(f"get({staying!r})"),
        one.say(f"get({brief!r})"),
        one.say(f"get({handle[:-1] + ('x' if handle[-1] != 'x' else 'y')!r})"),
        one.say(f"get({'lost.' + handle.rpartition('.')[2]!r})"),
        one.say("get('nonsense')"),
    }
    assert len(texts) == 1
    assert str(texts.pop()).startswith(GONE)
    stranger.do(f"drop({handle!r})", f"drop({staying!r})")
    assert one.say(f"bytes(get({handle!r})).decode()") == "secret"
    assert one.say(f"torch.equal(get({staying!r}).cpu(), there * 2)") is True


def test_data_on_a_worker_outlives_its_function_and_its_models_eviction(
    node: SharedNode,
) -> None:
    one, other = node.function("one"), node.function("other")
    leaving = data_function(node.cluster, node.address, "leaving")
    handle = leaving.put("double(there.cuda())")
    leaving.kill()
    assert other.say(f"torch.equal(get({handle!r}).cpu(), there * 2)") is True
    other.do(f"drop({handle!r})")

    handle = one.put("double(there.cuda())")
    small = one.put("double(there[:128].cuda())")  # of memory that is sealed
    evict_all(node.cluster)
    assert other.say(f"torch.equal(get({small!r}).cpu(), there[:128] * 2)") is True
    assert other.say(f"torch.equal(triple(get({handle!r})).cpu(), there * 6)") is True


def evict_all(cluster: TwoNodes) -> None:
    """Have the scheduler evict every model, once no lease is in its way."""

    def evicted() -> bool:
        residents = [each for gpu in cluster.gpus().values() for each in gpu["residents"]]
        for resident in residents:
            with suppress(HTTPError):  # it is in use still
                cluster.get(f"/models/{resident['model']}/evict", "POST")
        return not residents

    wait_until(evicted, "every model is evicted")


def test_data_of_a_worker_that_is_killed_is_gone_and_all_else_is_not(node: SharedNode) -> None:
    one, other = node.function("one"), node.function("other")
    handle, saved = one.put("double(there.cuda())"), one.put("there")
    kill_workers(node.manager)
    wait_until(
        lambda: str(other.say(f"get({handle!r}).cpu().sum().item()")).startswith(GONE),
        "it is gone",
    )
    assert other.say(f"torch.equal(get({saved!r}), there)") is True
    handle = one.put("double(there.cuda())")
    assert other.say(f"torch.equal(get({handle!r}).cpu(), there * 2)") is True


@pytest.mark.parametrize("wire", ["unix", "tls"])
def test_data_goes_to_another_node_and_is_gone_with_its_own(cluster: TwoNodes, wire: str) -> None:
    site = f"127.0.0.1:{HeldPort().keep()}"
    a_sock, b_sock = (f"unix:{cluster.folder / name}.sock" for name in ("a", "b"))
    options: list[str] = []
    if wire == "tls":
        certificate, key = self_signed(cluster.folder)
        options = ["--listen", f"tls:{site}", "--certificate", str(certificate)]
        options += ["--key", str(key), "--advertise", f"tls:{site}"]
    a = cluster.node("a", a_sock, *options, memory="2GiB")
    cluster.node("b", b_sock, memory="2GiB")
    one, other = data_function(cluster, a_sock, "one"), data_function(cluster, b_sock, "other")
    host, large = one.put("{'x': there}"), one.put("b'y' * 40_000_001")
    assert host.startswith("a.")
    other.do(f"kept['v'] = get({host!r})")
    assert other.say("torch.equal(kept['v']['x'], there)") is True
    assert other.say(f"get({large!r}).nbytes") == 40_000_001
    assert other.say(f"set(get({large!r})) == {{ord('y')}}") is True

    other.do(f"drop({host!r})")
    wait_until(
        lambda: str(one.say(f"str(get({host!r}))")).startswith(GONE), "the order to drop has come"
    )
    a.kill()
    assert str(other.say(f"get({large!r})")).startswith(GONE)
    assert other.say("torch.equal(kept['v']['x'], there)") is True


def test_data_is_spilled_when_memory_is_short_and_leaves_nothing_behind(
    cluster: TwoNodes, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    address, manager = one_node(cluster, "--spill", str(spill), "--data-memory", "4MiB")
    one, other = data_function(cluster, address, "one"), data_function(cluster, address, "other")
    handles = [one.put(f"bytes([{number}]) * 1_500_000") for number in range(6)]
    for number, handle in enumerate(handles):
        assert other.say(f"set(get({handle!r})) == {{{number}}}") is True
    assert not list((spill / "data").iterdir())
    other.do("settle()")
    for handle in handles:
        one.do(f"drop({handle!r})")
    wait_until(lambda: not open_data(manager), "no memory or file is open")


MAKER = """
import torch
torch.set_grad_enabled(False)

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((256,), SCALE))

    def forward(self, x):
        return x * self.weight

model = Scale().cuda()

def handle(event, context):
    given = event.data
    if given is None:
        given = torch.arange(256 * 1024.0).view(-1, 256)
    result = model(given.cuda())
    if event.path == "/sum":
        return str(result.double().sum().item())
    return result
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_tensor_goes_through_three_functions_by_handles_in_headers(
    cluster: TwoNodes, kind: str
) -> None:
    address, manager = one_node(cluster, "--runtime", "stream")
    path = os.pathsep.join([str(ACTIVATE), str(ROOT)])
    with ExitStack() as stack:
        functions = []
        for name, scale in (("one", "2.0"), ("two", "3.0"), ("three", "5.0")):
            handler = MAKER.replace("SCALE", scale).replace("def handle", f"{kind} handle")
            running = runtime(
                handler,
                GPUFAAS_ENABLED="1",
                GPUFAAS_ADDRESS=address,
                GPUFAAS_CREDENTIAL=cluster.credential(name),
                GPUFAAS_TRACING="wait",
                PYTHONPATH=path,
            )
            functions.append(stack.enter_context(running))
        one, two, three = functions
        wanted, handle = {"X-Gpu-Data": "handle"}, ""
        for _ in range(2):
            first = one.call(headers=wanted)
            handle = first.headers["X-Gpu-Data"]
            assert json.loads(first.body) == {"data": handle}
            second = two.call(headers={"X-Gpu-Data": f"{handle}, handle"})
            assert second.status == 200, two.written()
            total = three.call("/sum", headers={"X-Gpu-Data": second.headers["X-Gpu-Data"]})
            count = 256 * 1024
            assert float(total.body) == 2 * 3 * 5 * (count - 1) * count / 2

        plain = one.call()
        assert plain.status == 500  # a tensor is no body
        forged = two.call(headers={"X-Gpu-Data": handle[:-6] + "abcdef"})
        assert forged.status == 500
        assert b"DataUnavailable" in forged.body
    assert manager.running
