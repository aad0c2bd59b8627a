"""What a look shows of the queue: the first in order, without sorting the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Bundle, Pending, RequestQueue
from scheduler.model.values import Request, RequestId
from scheduler.service.page_feed import Glances, in_order, lengths
from tests.kit.worlds.service_world import leading

pytestmark = pytest.mark.timeout(180, func_only=True)


@given(st.lists(st.integers(0, 4), max_size=40), st.data())
def test_waiting_requests_are_shown_in_their_order(models: list[int], data: st.DataObject) -> None:
    bundles = [Bundle((ModelId(f"m{number}"),)) for number in range(5)]
    queue, waiting = RequestQueue(), []
    for number, model in enumerate(models):
        request = Request(RequestId(f"r{number}"), f"f{model}", bundles[model].models)
        pending = Pending(request, bundles[model], number, 0.0)
        queue.add(pending, number, 0.0)
        waiting.append(pending)
    gone = data.draw(st.sets(st.sampled_from(range(len(models))))) if models else set()
    for number in gone:
        queue.remove(waiting[number], 0.0)
    left = [pending for number, pending in enumerate(waiting) if number not in gone]
    assert list(in_order(queue)) == left == list(queue)
    counted = dict(lengths(queue))
    functions = [pending.request.function for pending in left]
    assert counted == {name: functions.count(name) for name in set(functions)}
    assert list(counted.values()) == sorted(counted.values(), reverse=True)


async def test_utilisation_is_the_part_of_looks_at_which_a_gpu_was_busy() -> None:
    async with leading() as world:
        assert world.office is not None
        glances = Glances(world.office.core, world.office.history, 0.0)
        for _ in range(9):
            assert glances.gpus()["g0"]["utilisation"] is None
        assert glances.gpus()["g0"]["utilisation"] == 0.0
        held = await world.acquire("r0")
        for _ in range(9):
            glances.gpus()
        shown = glances.gpus()["g0"]
        assert (shown["state"], shown["utilisation"]) == ("busy", 0.5)
        await world.release(held.body["lease"])


async def test_glance_is_equal_while_nothing_changes() -> None:
    async with leading() as world:
        assert world.office is not None
        held = await world.acquire("r0")
        glances = Glances(world.office.core, world.office.history, 1e9)
        first, second = glances.gpus(), glances.gpus()
        assert first == second
        await world.office.driver.pin(ModelId("bert"))
        assert glances.gpus() != first
        await world.release(held.body["lease"])
