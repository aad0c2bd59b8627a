"""The page over a real scheduler and a real gateway: what it shows, and what is ordered there."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientSession

from cache_manager.model.ids import ModelId
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import FunctionId
from gateway_ext.openfaas.basic_auth import BasicCredentials
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.routes import WatcherFeed
from gateway_ext.ui.rows import DeadLetterRows
from gateway_ext.ui.state import Json
from scheduler.client.operator_client import OperatorClient
from scheduler.model.errors import StoreUnavailable
from scheduler.model.events import ModelRegistered
from scheduler.model.values import ModelSpec
from scheduler.service.access import ApiRole, token
from scheduler.store.datastore import StoreLease
from scheduler.store.memory_store import MemoryStore
from tests.kit import waiting
from tests.kit.cores.builders import gpu
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds import gateway_world as gateways
from tests.kit.worlds import service_world as schedulers
from tests.kit.worlds.service_world import SECRET

pytestmark = pytest.mark.timeout(180, func_only=True)

ORDER = {"X-Requested-With": "gpufaas"}
MODEL = "openfaas-fn/0123456789abcdef0123"


@dataclass(frozen=True, slots=True)
class World:
    """Both, and who asks them."""

    scheduler: schedulers.World
    gateway: gateways.World

    async def state(self) -> dict[str, Any]:
        """A fresh one, although the pause after a look grows with what it cost."""
        await asyncio.sleep(0.3)
        (end_feed,) = cast(list[Any], self.gateway.gateway._ends)  # noqa: SLF001
        cast(WatcherFeed, end_feed.__self__).soon()
        result = await self.gateway.get("/ui/state")
        assert result.status == 200
        found: dict[str, Any] = result.body
        return found

    async def order(self, path: str, body: object = None) -> gateways.Said:
        """As the page does it."""
        return await self.gateway.ask("POST", path, body, headers=ORDER)

    async def serve(self, request: str, model: str = MODEL, function: str = "reader") -> None:
        """One request, from its arrival to its end."""
        result = await self.scheduler.acquire(request, model, function=f"openfaas-fn/{function}")
        await self.scheduler.release(result.body["lease"])
        assert self.scheduler.office is not None
        requests = self.scheduler.office.core.requests
        await eventually(lambda: request not in requests)


def a_gateway(
    folder: Path, console: OperatorClient, **more: Any
) -> AbstractAsyncContextManager[gateways.World]:
    return gateways.gateway_world(folder, console=console, every_s=0.05, **more)


@asynccontextmanager
async def world(
    folder: Path, *nodes: FakeNode, role: ApiRole = ApiRole.ADMIN, **more: Any
) -> AsyncIterator[World]:
    async with (
        schedulers.leading(*nodes) as scheduler,
        OperatorClient([scheduler.url], token(SECRET, role), patience_s=10.0) as console,
        a_gateway(folder, console, **more) as gateway,
    ):
        yield World(scheduler, gateway)


async def test_state_joins_what_both_know(tmp_path: Path) -> None:
    async with world(tmp_path) as both:
        await both.gateway.deploy("reader", annotations={"com.gpufaas.enabled": "true"})
        await both.serve("r0")
        state = await both.state()
        (shown,) = state["gpus"]
        (function,) = state["functions"]
        (decision,) = state["decisions"]
        assert (state["scheduler"]["leader"], state["scheduler"]["ok"]) == ("s0", True)
        assert state["scheduler"]["url"] == both.scheduler.url
        assert state["policy"] == {"name": "lalbo3", "parameters": {"o3_limit": 25}}
        assert [one["label"] for one in shown["residents"]] == ["reader"]
        assert (function["id"], function["gpu"]) == ("reader.openfaas-fn", True)
        assert function["gpu_seconds"] >= 0.0
        assert list(function["local"]) == []
        assert (decision["function"], decision["namespace"]) == ("reader", "openfaas-fn")
        assert decision["outcome"] == "completed"
        assert state["totals"]["misses"] == 1
        assert state["alerts"] == []


async def test_alert_names_a_function_that_never_became_ready_until_it_is_mended(
    tmp_path: Path,
) -> None:
    provider = MemoryProvider()
    async with world(tmp_path, provider=provider) as both:
        await both.gateway.deploy("reader")
        provider.spoil(FunctionId("openfaas-fn", "reader"), "its handler cannot be imported")
        (alert,) = (await both.state())["alerts"]
        assert (alert["code"], alert["about"]) == ("does-not-start", "reader.openfaas-fn")
        await both.gateway.deploy("reader")
        assert (await both.state())["alerts"] == []


async def test_functions_are_listed_by_id_whenever_they_were_deployed(tmp_path: Path) -> None:
    async with world(tmp_path) as both:
        for name in ("reader-10", "writer", "reader-9"):
            await both.gateway.deploy(name)
        functions = (await both.state())["functions"]
        assert [one["name"] for one in functions] == ["reader-9", "reader-10", "writer"]


async def test_model_gets_its_name_once_a_function_is_known_to_use_it(tmp_path: Path) -> None:
    async with world(tmp_path) as both:
        order = f"/ui/models/{MODEL}/prefetch"
        assert both.scheduler.office is not None
        both.scheduler.office.driver.report(ModelRegistered(ModelSpec(ModelId(MODEL))))
        assert (await both.order(order, {"gpu": "g0"})).status == 202
        before = (await both.state())["gpus"][0]["residents"]
        digest = MODEL.rpartition("/")[2]
        await both.gateway.deploy("reader", annotations={"com.gpufaas.model": digest})
        assert [one["label"] for one in before] == [digest[:8]]

        async def is_named() -> bool:
            (resident,) = (await both.state())["gpus"][0]["residents"]
            return bool(resident["label"] == "reader")

        await waiting.eventually(is_named, "the resident is named after its function")


async def test_a_model_gets_the_name_of_a_present_function_once_its_first_is_gone(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as both:
        await both.gateway.deploy("first", annotations={"com.gpufaas.enabled": "true"})
        await both.serve("r0", function="first")
        await both.gateway.deploy("reader", annotations={"com.gpufaas.enabled": "true"})
        await both.serve("r1")

        async def labels() -> list[str]:
            return [one["label"] for one in (await both.state())["gpus"][0]["residents"]]

        assert await labels() == ["first"]
        await both.gateway.ask("DELETE", "/system/functions", {"functionName": "first"})
        assert await labels() == ["first"], "no present function is known to use it yet"
        await both.serve("r2")

        async def is_renamed() -> bool:
            return await labels() == ["reader"]

        await eventually(is_renamed, "the resident is named after the function that is there")


async def test_policy_is_switched_by_the_page(tmp_path: Path) -> None:
    async with world(tmp_path) as both:
        chosen = {"name": "netgain", "parameters": {"patience": 3}}
        assert (await both.order("/ui/policy", chosen)).status == 202
        state = await both.state()
        found = (await both.scheduler.get("/policy")).body
        assert state["policy"]["name"] == found["policy"] == "netgain"
        assert state["policy"]["parameters"] == found["parameters"]
        (policy,) = (each for each in state["policies"] if each["name"] == "netgain")
        found = {each["name"]: each for each in policy["parameters"]}
        assert (found["patience"]["value"], found["patience"]["type"]) == (3, "int")
        refused = await both.order("/ui/policy", {"name": "best"})
        assert (refused.status, "best" in refused.body) == (422, True)
        wrong = await both.order("/ui/policy", {"name": "lb", "parameters": {"x": 1}})
        assert wrong.status == 422
        nonsense = await both.order("/ui/policy", {"name": "lb", "parameters": {"x": True}})
        assert nonsense.status == 400


class LateStore(MemoryStore):
    """Writes, and does not say so."""

    async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
        await super().put(key, value, lease)
        raise StoreUnavailable("etcd does not answer")


async def test_policy_that_etcd_may_have_stored_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as both:
        reign = both.scheduler.service.reign
        assert reign is not None, "it leads"
        monkeypatch.setattr(reign.policy, "_store", LateStore())
        said = await both.order("/ui/policy", {"name": "lb"})
        assert said.status == 503
        assert "etcd does not answer; once etcd answers, the policy may be in force" in said.body


async def test_models_are_pinned_evicted_and_brought_back(tmp_path: Path) -> None:
    async with world(tmp_path) as both:
        await both.serve("r0")

        async def resident() -> dict[str, Any] | None:
            found = (await both.state())["gpus"][0]["residents"]
            return found[0] if found else None

        path = f"/ui/models/{MODEL}"
        assert (await both.order(f"{path}/pin", {"gpu": "g0"})).status == 202
        assert (await resident() or {})["pinned"]
        assert (await both.order(f"{path}/evict")).status == 409
        assert (await both.order(f"{path}/unpin")).status == 202
        assert (await both.order(f"{path}/evict", {"gpu": "g0"})).status == 202
        assert await resident() is None
        assert (await both.order(f"{path}/prefetch", {"gpu": "g0"})).status == 202
        assert (await resident() or {})["model"] == MODEL
        assert (await both.order(f"{path}/pin", {"gpu": "g9"})).status == 409
        assert (await both.order("/ui/models/no/such/evict")).status == 409
        assert (await both.order(f"{path}/sell")).status == 400
        assert (await both.order(f"{path}/pin", {"gpu": 7})).status == 400


async def test_decision_is_explained_with_the_names_of_functions(tmp_path: Path) -> None:
    async with world(tmp_path) as both:
        await both.gateway.deploy("reader")
        await both.serve("call-1~ab/c")
        await both.state()
        result = await both.gateway.get("/ui/decisions/call-1~ab/c")
        assert result.status == 200
        assert result.body["labels"] == {MODEL: "reader"}
        assert result.body["decisions"][0]["why"]["candidates"]
        assert (await both.gateway.get("/ui/decisions/other")).status == 404


async def test_gateway_that_may_only_call_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path, role=ApiRole.CALLER) as both:
        assert (await both.state())["scheduler"]["ok"]
        result = await both.order("/ui/policy", {"name": "lb"})
        assert result.status == 502
        assert "only administrators" in result.body


async def test_scheduler_that_is_away_is_reported_and_comes_back(tmp_path: Path) -> None:
    async with schedulers.a_world() as scheduler:
        console = OperatorClient([scheduler.url], token(SECRET, ApiRole.ADMIN), patience_s=0.2)
        async with console, a_gateway(tmp_path, console) as gateway:
            both = World(scheduler, gateway)
            state = await both.state()
            assert not state["scheduler"]["ok"]
            assert state["scheduler"]["why"]
            assert [alert["code"] for alert in state["alerts"]] == ["no-scheduler"]
            assert (await both.order("/ui/policy", {"name": "lb"})).status == 503
            async with scheduler.service.lead(3) as office:
                scheduler.office = office
                scheduler.attach(fake_node("n0", gpu("g0", node="n0")))
                state = await both.state()
                assert state["scheduler"]["ok"]
                assert [one["id"] for one in state["gpus"]] == ["g0"]
            state = await both.state()
            assert not state["scheduler"]["ok"]
            assert [one["id"] for one in state["gpus"]] == ["g0"]  # as they were
            assert state["scheduler"]["term"] == 3


async def test_new_leader_replaces_what_the_old_one_reported(tmp_path: Path) -> None:
    async with schedulers.a_world() as scheduler:
        console = OperatorClient([scheduler.url], token(SECRET, ApiRole.ADMIN), patience_s=0.2)
        async with console, a_gateway(tmp_path, console) as gateway:
            both = World(scheduler, gateway)
            for term in (1, 2):
                async with scheduler.service.lead(term) as office:
                    scheduler.office = office
                    name = f"n{term}"
                    scheduler.attach(fake_node(name, gpu(f"g{term}", node=name), load_s=0.0))
                    await both.serve(f"r{term}")
                    await waiting.eventually(
                        partial(_shows, both, f"g{term}", f"r{term}"), "the new leader is shown"
                    )


async def test_gpus_are_in_the_order_that_people_count(tmp_path: Path) -> None:
    nodes = [fake_node(f"n{n}", gpu(f"n{n}/cuda:0", node=f"n{n}")) for n in (10, 9, 1)]
    async with world(tmp_path, *nodes) as both:
        state = await both.state()
        assert [one["node"] for one in state["gpus"]] == ["n1", "n9", "n10"]


async def test_dead_letters_are_shown_replayed_and_deleted(tmp_path: Path) -> None:
    async with world(tmp_path, async_attempts=1, wake_s=0.05) as both:
        await both.gateway.deploy("reader")
        for _ in range(2):
            result = await both.gateway.ask("POST", "/async-function/reader", {})
            assert result.status == 202

        async def are_dead() -> bool:
            return bool((await both.state())["dead_letters"]["count"] >= 2)

        await eventually(are_dead, "two dead letters")
        state = await both.state()
        first, second = state["dead_letters"]["items"]
        assert state["dead_letters"]["count"] == 2
        assert (first["function"], first["tries"]) == ("reader.openfaas-fn", 1)
        assert first["why"]
        assert [alert["code"] for alert in state["alerts"]] == ["dead-letters"]
        assert (await both.order(f"/ui/dead-letters/{first['id']}/replay")).status == 202
        gone = await both.gateway.ask("DELETE", f"/ui/dead-letters/{second['id']}", headers=ORDER)
        assert gone.status == 202
        left = [letter["id"] for letter in (await both.state())["dead_letters"]["items"]]
        assert second["id"] not in left  # the other one may have died again
        assert (await both.order("/ui/dead-letters/99/replay")).status == 404
        assert (await both.order("/ui/dead-letters/x/replay")).status == 404


async def test_gateway_that_stops_does_not_wait_for_watchers(tmp_path: Path) -> None:
    who = {"Authorization": BasicCredentials(gateways.USER, gateways.PASSWORD).header}
    async with ClientSession() as session, AsyncExitStack() as stack:
        async with world(tmp_path, drain_s=20.0) as both:
            url = f"{both.gateway.gateway.url}/ui/events"
            answer = await stack.enter_async_context(session.get(url, headers=who))
            while b"event: state" not in await answer.content.readline():
                pass
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 15.0
        await answer.content.read()  # it has an end


async def test_frozen_scheduler_is_reported_as_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.client.operator_client._ANSWERED_S", 60.0)  # the other limit
    held = []

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, OperatorClient([url], "token", patience_s=0.1) as console:
        cluster = PageSource(console, (), GatewayMeters(), NoLetters(), within_s=0.2)
        look = await cluster.look()
        assert not look.whole["scheduler"]["ok"]
        assert "has not answered" in look.whole["scheduler"]["why"]
        assert set((await cluster.point()).values()) == {None}
        for writer in held:
            writer.close()


class NoLetters(DeadLetterRows):
    """Of no queue."""

    def __init__(self) -> None:
        """There is none to read."""

    async def look(self) -> Json:
        """None are there."""
        return {"count": 0, "items": [], "why": ""}


class ForgetfulScheduler(OperatorClient):
    """Has other functions at every look, and names those alone that are new since a mark."""

    def __init__(self) -> None:
        super().__init__(["http://127.0.0.1:1"], "token")
        self.marks: list[str] = []

    async def look(self, mark: str) -> Mapping[str, Any]:
        self.marks.append(mark)
        number = len(self.marks)
        names = [f"dev/f{number}-{each}" for each in range(2_000)]
        return {
            "name": "s0", "term": 1, "store": "memory", "now": 0.0, "mark": f"m-{number}",
            "whole": not mark, "policy": "lb", "parameters": {}, "decisions": [], "gpus": [],
            "gpus_gone": [], "queue": {"length": 0, "local": 0, "head": [], "by_function": []},
            "totals": {"ended": {}, "hit_ratio": None, "rate": None, "requests": 0}, "billed": {},
            "gpu_seconds": dict.fromkeys(names, 1.0),
        }  # fmt: skip

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        return [{"name": "lb", "summary": "", "rule": "", "parameters": {}}]


async def test_everything_is_read_anew_once_too_many_functions_are_remembered() -> None:
    console = ForgetfulScheduler()
    source = PageSource(console, (), GatewayMeters(), NoLetters())
    for _ in range(15):
        await source.look()

    whole = [number for number, mark in enumerate(console.marks) if not mark]
    assert whole == [0, 6, 12], "at first, and each time after more than 10,000 names"


async def _shows(both: World, gpu_id: str, request: str) -> bool:
    """Whether this is the one GPU and the one decision that the page shows."""
    state = await both.state()
    shown = [one["id"] for one in state["gpus"]], [one["request"] for one in state["decisions"]]
    return shown == ([gpu_id], [request])
