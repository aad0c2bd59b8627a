"""Models that are kept: pinned once they are learned, unpinned when no function keeps them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from cache_manager.model.ids import ModelId
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.scaling.kept_models import (
    ANSWERED_WITHIN_S,
    CHECK_EVERY_S,
    EVERY_S,
    MOST_RETRY_S,
    MOST_UNPINS,
    KeptModels,
)
from scheduler.api import EventRefused
from scheduler.client.operator_client import OperatorClient
from scheduler.model.errors import SchedulerUnreachable
from scheduler.service.access import ApiRole, token
from tests.kit.virtual_time import virtually
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

BERT, GPT = "b" * 64, "c" * 64
BERT_ID, GPT_ID = ModelId(f"team/{BERT[:20]}"), ModelId(f"team/{GPT[:20]}")
KEEP = {"com.gpufaas.enabled": "true", "com.gpufaas.keep": "true"}


@dataclass
class Pins(OperatorClient):
    """Who pins what is resident; `away` is a scheduler that is gone, `deaf` a frozen one."""

    resident: set[ModelId] = field(default_factory=lambda: {BERT_ID, GPT_ID})
    now: set[ModelId] = field(default_factory=set)
    asked: list[tuple[str, ModelId]] = field(default_factory=list)
    away: bool = False
    deaf: bool = False

    async def pin(self, model: ModelId) -> None:
        await self._asked("pin", model)
        self.now.add(model)

    async def unpin(self, model: ModelId) -> None:
        await self._asked("unpin", model)
        self.now.discard(model)

    async def pinned(self) -> frozenset[ModelId]:
        if self.away:
            raise SchedulerUnreachable("no scheduler leads")
        return frozenset(self.now)

    async def _asked(self, verb: str, model: ModelId) -> None:
        self.asked.append((verb, model))
        if self.deaf:
            await asyncio.sleep(ANSWERED_WITHIN_S + 1)
        if self.away:
            raise SchedulerUnreachable("no scheduler leads")
        if model not in self.resident:
            raise EventRefused(None, "no GPU holds it; name a GPU to load it there")


@dataclass
class Stage:
    """A gateway's functions, and who keeps their models."""

    functions: Functions
    pins: Pins

    def deploy(self, name: str, namespace: str = "team", image: str = "i", **more: str) -> Function:
        id_ = FunctionId(namespace, name)
        annotations = KEEP | {f"com.gpufaas.{key}": value for key, value in more.items()}
        self.functions.function_is(Deployment(id_, image, annotations=annotations), [], wanted=1)
        found = self.functions.by_id(id_)
        assert found is not None
        return found

    def remove(self, name: str) -> None:
        self.functions.function_gone(FunctionId("team", name))


@asynccontextmanager
async def a_stage(pins: Pins | None = None) -> AsyncIterator[Stage]:
    stage = Stage(Functions(), pins or Pins())
    clock = asyncio.get_running_loop().time
    async with KeptModels(stage.functions, stage.pins, clock):
        yield stage


async def some_looks() -> None:
    await asyncio.sleep(3.5 * EVERY_S)


@virtually
async def test_models_are_pinned_once_when_a_function_has_learned_them() -> None:
    async with a_stage() as stage:
        function = stage.deploy("f")
        await some_looks()
        assert stage.pins.asked == []
        function.learned.saw(f"{BERT},{GPT}".encode())
        await asyncio.sleep(200)
        assert sorted(stage.pins.asked) == [("pin", BERT_ID), ("pin", GPT_ID)]
    assert stage.pins.now == {BERT_ID, GPT_ID}


@virtually
async def test_nothing_is_pinned_when_a_function_does_not_wish_it_or_has_no_gpu() -> None:
    async with a_stage() as stage:
        stage.deploy("f", keep="false").learned.saw(BERT.encode())
        stage.deploy("g", enabled="false", model=BERT)
        await some_looks()
        assert stage.pins.asked == []


@virtually
async def test_models_are_unpinned_when_the_function_is_removed() -> None:
    async with a_stage() as stage:
        stage.deploy("f").learned.saw(BERT.encode())
        await some_looks()
        stage.remove("f")
        await some_looks()
        assert stage.pins.asked == [("pin", BERT_ID), ("unpin", BERT_ID)]


@virtually
async def test_models_are_unpinned_when_an_update_does_not_wish_it() -> None:
    async with a_stage() as stage:
        stage.deploy("f").learned.saw(BERT.encode())
        await some_looks()
        stage.deploy("f", keep="no")
        await some_looks()
        assert stage.pins.now == set()


@virtually
async def test_models_stay_pinned_after_an_update_until_it_is_known_what_it_uses() -> None:
    async with a_stage() as stage:
        stage.deploy("f").learned.saw(BERT.encode())
        await some_looks()
        updated = stage.deploy("f", image="i2")
        await some_looks()
        assert stage.pins.asked == [("pin", BERT_ID)]
        updated.learned.saw(GPT.encode())
        await some_looks()
        assert stage.pins.now == {GPT_ID}


@virtually
async def test_what_calls_use_no_more_is_unpinned_and_what_they_use_again_is_pinned() -> None:
    async with a_stage() as stage:
        function = stage.deploy("f")
        function.learned.saw(BERT.encode())
        await some_looks()
        function.learned.saw(GPT.encode())
        await some_looks()
        assert stage.pins.now == set()
        for _ in range(4):
            function.learned.saw(BERT.encode())
        await some_looks()
        assert stage.pins.now == {BERT_ID}


@virtually
async def test_a_model_stays_pinned_when_another_function_keeps_it_too() -> None:
    async with a_stage() as stage:
        for name in ("f", "g"):
            stage.deploy(name).learned.saw(BERT.encode())
        await some_looks()
        stage.remove("f")
        await some_looks()
        assert stage.pins.asked == [("pin", BERT_ID)]
        stage.remove("g")
        await some_looks()
        assert stage.pins.now == set()


@virtually
async def test_namespaces_keep_their_own_models() -> None:
    other = ModelId(f"other/{BERT[:20]}")
    async with a_stage(Pins({BERT_ID, other})) as stage:
        stage.deploy("f").learned.saw(BERT.encode())
        stage.deploy("f", "other").learned.saw(BERT.encode())
        await some_looks()
        stage.remove("f")
        await some_looks()
        assert stage.pins.now == {other}


@virtually
async def test_pinning_is_tried_ever_more_rarely_while_no_gpu_holds_the_model() -> None:
    async with a_stage(Pins(set())) as stage:
        stage.deploy("f", model=BERT)
        await asyncio.sleep(120)
        assert 6 <= len(stage.pins.asked) <= 10
        stage.pins.resident.add(BERT_ID)
        await asyncio.sleep(MOST_RETRY_S + 2 * EVERY_S)
        assert stage.pins.now == {BERT_ID}


@virtually
async def test_orders_are_given_later_when_no_scheduler_answers() -> None:
    async with a_stage(Pins(away=True)) as stage:
        stage.deploy("f", model=f"{BERT},{GPT}")
        await asyncio.sleep(120)
        assert Counter(stage.pins.asked).keys() == {("pin", BERT_ID)}
        assert 6 <= len(stage.pins.asked) <= 10
        stage.remove("f")
        stage.pins.away = False
        await asyncio.sleep(MOST_RETRY_S + 2 * EVERY_S)
        # The pin without an answer may have been carried out.
        assert stage.pins.asked[-1] == ("unpin", BERT_ID)
        assert stage.pins.now == set()


@virtually
async def test_orders_are_given_again_when_the_scheduler_is_frozen() -> None:
    async with a_stage(Pins(deaf=True)) as stage:
        stage.deploy("f", model=BERT)
        await asyncio.sleep(ANSWERED_WITHIN_S + 1)
        stage.pins.deaf = False
        await asyncio.sleep(3 * EVERY_S)
        assert stage.pins.now == {BERT_ID}


@virtually
async def test_a_model_is_pinned_again_when_its_pin_was_lost_with_its_gpu() -> None:
    async with a_stage() as stage:
        stage.deploy("f").learned.saw(BERT.encode())
        await some_looks()
        stage.pins.now.clear()
        await asyncio.sleep(CHECK_EVERY_S + 2 * EVERY_S)
        assert stage.pins.now == {BERT_ID}


@virtually
async def test_a_lost_pin_is_not_made_again_when_nobody_wants_it_any_more() -> None:
    between = round(CHECK_EVERY_S / EVERY_S)
    for looks in range(between - 2, between + 3):  # the next of one of them finds that it is lost
        async with a_stage() as stage:
            stage.deploy("f").learned.saw(BERT.encode())
            await asyncio.sleep((looks + 1.5) * EVERY_S)
            stage.pins.now.clear()
            stage.remove("f")
            await some_looks()
            assert stage.pins.asked == [("pin", BERT_ID), ("unpin", BERT_ID)], looks


@virtually
async def test_unpinning_is_given_up_when_the_model_is_nowhere() -> None:
    async with a_stage() as stage:
        stage.deploy("f").learned.saw(BERT.encode())
        await some_looks()
        stage.pins.resident.clear()
        stage.remove("f")
        await asyncio.sleep(600)
        assert Counter(stage.pins.asked) == {
            ("pin", BERT_ID): 1,
            ("unpin", BERT_ID): MOST_UNPINS,
        }


class Broken(Pins):
    """A mistake of ours."""

    async def pin(self, model: ModelId) -> None:
        raise RuntimeError(model)


def test_a_mistake_that_ends_it_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    @virtually
    async def test() -> None:
        async with a_stage(Broken()) as stage:
            stage.deploy("f", model=BERT)
            await some_looks()

    test()
    assert [record.message for record in caplog.records] == ["keeping models in GPU memory failed"]


async def test_a_scheduler_keeps_the_models_that_a_function_asks_to_keep() -> None:
    functions = Functions()
    stage = Stage(functions, Pins())
    async with (
        leading() as world,
        OperatorClient([world.url], token(SECRET, ApiRole.ADMIN)) as pinning,
    ):
        await world.release((await world.acquire("r0", BERT_ID)).body["lease"])
        async with KeptModels(functions, pinning):
            stage.deploy("f").learned.saw(BERT.encode())
            await eventually(pinning.pinned, "the model is pinned")
            answer = await world.ask("POST", f"/models/{BERT_ID}/evict")
            assert (answer.status, answer.body["error"]) == (409, "refused")
            stage.remove("f")

            async def is_free() -> bool:
                return not await pinning.pinned()

            await eventually(is_free, "the model is pinned no more")
        assert (await world.ask("POST", f"/models/{BERT_ID}/evict")).status == 200
