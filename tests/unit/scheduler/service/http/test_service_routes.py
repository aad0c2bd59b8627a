"""Policy, cluster, queue, models, explanations, health and metrics over HTTP."""

import asyncio

import pytest

from cache_manager.model.ids import ModelId
from scheduler import policies
from scheduler.model.events import RunFinished
from scheduler.model.values import SlotId
from scheduler.service.access import ApiRole
from tests.kit.cores.builders import gpu
from tests.kit.nodes.fake_node import fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import World, a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)


async def serve(world: World, request: str, *models: str) -> None:
    """Acquire and release."""
    answer = await world.acquire(request, *models)
    await world.release(answer.body["lease"])
    await eventually(lambda: pending(world) == 0)


def pending(world: World) -> int:
    assert world.office is not None
    return len(world.office.core.requests)


# -- policy -------------------------------------------------------------------------------------


async def test_policy_is_shown_with_its_parameters() -> None:
    async with leading() as world:
        answer = await world.get("/policy")
        assert answer.body == {"policy": "lalbo3", "parameters": {"o3_limit": 25}}


async def test_policy_changes_without_losing_who_waits() -> None:
    async with leading() as world:
        holder = await world.acquire("r0")
        asked = asyncio.create_task(world.acquire("r1"))
        await eventually(lambda: pending(world) == 2)
        choice = {"policy": "netgain", "parameters": {"patience": 3}}
        assert (await world.ask("PUT", "/policy", choice)).status == 200
        shown = (await world.get("/policy")).body
        assert (shown["policy"], shown["parameters"]["patience"]) == ("netgain", 3)
        await world.release(holder.body["lease"])
        assert (await asked).status == 200


@pytest.mark.parametrize(
    ("choice", "status", "error"),
    [
        ({"policy": "best"}, 422, "unknown-policy"),
        ({"policy": "lb", "parameters": {"o3_limit": 1}}, 422, "bad-parameter"),
        ({"policy": "lalbo3", "parameters": {"o3_limit": -1}}, 422, "bad-parameter"),
        ({"policy": "lb", "parameter": {}}, 400, "bad-request"),
        ({}, 400, "bad-request"),
    ],
)
async def test_policy_stays_when_the_new_one_makes_no_sense(
    choice: object, status: int, error: str
) -> None:
    async with leading() as world:
        answer = await world.ask("PUT", "/policy", choice)
        assert (answer.status, answer.body["error"]) == (status, error)
        assert (await world.get("/policy")).body["policy"] == "lalbo3"


async def test_every_policy_is_listed_in_its_own_words() -> None:
    async with leading() as world:
        found = (await world.get("/policies")).body
        assert [policy["name"] for policy in found] == list(policies.available())
        assert all(policy["summary"] and policy["rule"] for policy in found)


# -- cluster and queue ----------------------------------------------------------------------------


async def test_cluster_shows_gpus_counts_and_latencies() -> None:
    async with leading() as world:
        await serve(world, "r0")
        await serve(world, "r1")
        shown = (await world.get("/cluster")).body
        assert (shown["hits"], shown["misses"], shown["hit_ratio"]) == (1, 1, 0.5)
        assert shown["ended"] == {"completed": 2}
        assert [found["id"] for found in shown["gpus"]] == ["g0"]
        assert shown["gpus"][0]["residents"][0]["model"] == "bert"
        assert 0 <= shown["waits"]["median_s"] <= shown["totals"]["p99_s"]
        assert shown["accuracy"] is None


async def test_estimates_are_shown_beside_what_was_measured() -> None:
    async with leading() as world:
        assert world.office is not None
        answer = await world.acquire("r0")
        world.office.driver.report(RunFinished(SlotId("g0"), answer.body["models"][0], 1, 0.25))
        await world.release(answer.body["lease"])
        accuracy = (await world.get("/cluster")).body["accuracy"]
        assert (accuracy["leases"], accuracy["measured_s"]) == (1, 0.25)
        assert accuracy["estimated_s"] == answer.body["estimate"]["load_s"] + 0.5
        assert accuracy["error_s"] == pytest.approx(accuracy["estimated_s"] - 0.25)


async def test_queue_shows_who_waits_in_order() -> None:
    async with leading() as world:
        await world.acquire("r0")
        tasks = [
            asyncio.create_task(world.acquire(f"r{i}", waited_s=60.0 - 10.0 * i)) for i in (3, 2, 1)
        ]
        await eventually(lambda: pending(world) == 4)
        shown = (await world.get("/queue?most=2")).body
        for query in ("most=1_0", "most=%202", "most=2.0", "most=%D9%A3"):
            assert (await world.get(f"/queue?{query}")).status == 400
        for query in ("last_s=1_000", "last_s=nan", "last_s=inf", "last_s=%201", "last_s=-1"):
            assert (await world.get(f"/bill?{query}")).status == 400
        assert (await world.get("/bill?last_s=90.5")).status == 200
        assert shown["waiting"] + shown["waiting_locally"] == 3
        assert [found["request"] for found in shown["requests"]] == ["r1", "r2"]
        assert all(found["waited_s"] > 30 for found in shown["requests"])
        for task in tasks:
            task.cancel()


# -- models ---------------------------------------------------------------------------------------


async def test_models_show_who_holds_them() -> None:
    async with leading() as world:
        await serve(world, "r0", "team/bert")
        (shown,) = (await world.get("/models")).body
        assert shown["model"] == "team/bert"
        assert [holder["gpu"] for holder in shown["holders"]] == ["g0"]
        assert shown["load_s"] == {"absent": 0.0}
        for name in ("team/bert", "be"):
            answer = await world.get(f"/models/{name}")
            assert (answer.body["model"], answer.body["configured"]) == ("team/bert", [])
        assert (await world.get("/models/nobody")).status == 404
        assert (await world.ask("POST", "/models//pin")).status == 404


async def test_model_is_pinned_and_evicted_by_a_part_of_its_name() -> None:
    async with leading() as world:
        await serve(world, "r0", "team/bert")
        done = await world.ask("POST", "/models/be/pin")
        assert (done.status, done.body) == (200, {"model": "team/bert", "done": "pin"})
        answer = await world.ask("POST", "/models/team/bert/evict")
        assert (answer.status, answer.body["error"]) == (409, "refused")
        await world.ask("POST", "/models/team/bert/unpin")
        assert (await world.ask("POST", "/models/team/bert/evict")).status == 200
        assert (await world.get("/models")).body[0]["holders"] == []
        assert (await world.ask("POST", "/models/bert/prefetch?gpu=g0")).status == 200
        assert [h["gpu"] for h in (await world.get("/models")).body[0]["holders"]] == ["g0"]


async def test_model_is_named_by_its_function_and_shown_with_it() -> None:
    """The bill knows who uses a model."""
    async with leading() as world:
        await serve(world, "r0", "team/0a1b")
        (shown,) = (await world.get("/models")).body
        assert shown["functions"] == ["team/reader"]
        assert (await world.get("/cluster")).body["functions"] == {"team/0a1b": ["team/reader"]}
        for name in ("reader", "team/reader"):
            done = await world.ask("POST", f"/models/{name}/pin")
            assert (done.status, done.body["model"]) == (200, "team/0a1b")
        await world.ask("POST", "/models/reader/unpin")
        assert (await world.ask("POST", "/models/reader/evict")).status == 200
        assert (await world.ask("POST", "/models/reader/prefetch")).status == 200


async def test_order_about_a_model_or_gpu_that_is_unknown_is_refused() -> None:
    async with leading() as world:
        await serve(world, "r0", "bert-large")
        await serve(world, "r1", "bert-small")
        answer = await world.ask("POST", "/models/gpt/evict")
        assert answer.status == 404
        assert answer.body["message"].endswith("it uses no GPU, or was not called yet")
        assert (await world.ask("POST", "/models/bert-large/evict?gpu=g9")).status == 404
        answer = await world.ask("POST", "/models/bert/evict")
        assert answer.status == 400
        assert "bert-large, bert-small" in answer.body["message"]


# -- explanations ---------------------------------------------------------------------------------


async def test_explanation_names_candidates_and_what_came() -> None:
    node = fake_node("n0", gpu("g0", node="n0"), gpu("g1", node="n0"), load_s=0.0)
    async with leading(node) as world:
        assert world.office is not None
        answer = await world.acquire("team/r0")
        model, slot = answer.body["models"][0], SlotId(answer.body["slot"])
        await eventually(lambda: not node.loading)
        world.office.driver.report(RunFinished(slot, model, 1, 0.25))
        await world.release(answer.body["lease"])
        await eventually(lambda: pending(world) == 0)
        shown = (await world.get("/explain/team/r0")).body
        (decision,) = shown["decisions"]
        assert (shown["outcome"], decision["what"], decision["hit"]) == (
            "completed",
            "placed",
            False,
        )
        assert {found["slot"] for found in decision["why"]["candidates"]} == {"g0", "g1"}
        assert decision["rule"] == decision["why"]["rule"] != ""
        came = decision["came"]
        assert (came["run_s"], came["runs"], came["loaded_from"]) == (0.25, 1, {"bert": "absent"})
        assert came["held_s"] >= 0
        assert (await world.get("/explain")).body == ["team/r0"]
        (named,) = (await world.get("/explain?named=true")).body
        assert (named["request"], named["function"]) == ("team/r0", shown["function"])
        assert named["arrived_ago_s"] >= 0


async def test_decision_is_explained_without_candidates_when_there_are_too_many_slots() -> None:
    async with leading(explain_slots=0) as world:
        await serve(world, "r0")
        (decision,) = (await world.get("/explain/r0")).body["decisions"]
        assert decision["why"] is None
        assert decision["rule"] == "cached nowhere"


async def test_request_that_is_forgotten_or_unknown_cannot_be_explained() -> None:
    async with leading(history=1) as world:
        await serve(world, "r0")
        await serve(world, "r1")
        assert (await world.get("/explain/r0")).status == 404
        assert (await world.get("/explain/r1")).status == 200


# -- who may, health, metrics -------------------------------------------------------------------


async def test_callers_may_look_and_change_nothing() -> None:
    async with leading(role=ApiRole.CALLER) as world:
        await serve(world, "r0")
        assert (await world.get("/cluster")).status == 200
        for method, path in (("PUT", "/policy"), ("POST", "/models/bert/evict")):
            answer = await world.ask(method, path, {"policy": "lb"})
            assert (answer.status, answer.body["error"]) == (403, "not-allowed")


async def test_views_require_credentials() -> None:
    async with leading() as world:
        for path in ("/cluster", "/queue", "/models", "/policy", "/policies", "/explain"):
            answer = await world.get(path, headers={"Authorization": ""})
            assert answer.status == 401
            assert "Basic" in answer.headers["WWW-Authenticate"]
            assert "`gpufaas token`" in answer.body["message"]


async def test_health_shows_whether_callers_are_served() -> None:
    async with a_world() as world:
        ready = await world.get("/readyz", headers={"Authorization": ""})
        assert (ready.status, ready.body["leading"]) == (503, False)
        assert (await world.get("/healthz", headers={"Authorization": ""})).status == 200
        async with world.service.lead(3):
            ready = await world.get("/readyz", headers={"Authorization": ""})
            assert (ready.status, ready.body["term"], ready.body["store"]) == (200, 3, "memory")


async def test_scheduler_is_not_ready_when_every_gpu_has_a_load_that_makes_no_progress() -> None:
    async with leading() as world:
        assert world.office is not None
        gpus = list(world.office.core.cluster.gpus.values())
        for number, stuck in enumerate(gpus):
            stuck.stuck[ModelId("team/model")] = world.office.clock.now_s() - 7.0
            ready = await world.get("/readyz")
            assert ready.status == (503 if number + 1 == len(gpus) else 200)
            assert ready.body["stuck"][number].startswith(
                f"the load of team/model for nobody on {stuck.spec.id} of node {stuck.spec.node}"
            )
            seen_by_strangers = await world.get("/readyz", headers={"Authorization": ""})
            assert (seen_by_strangers.status, seen_by_strangers.body) == (
                ready.status,
                {**ready.body, "stuck": number + 1},
            )
        (shown, *_) = (await world.get("/feed")).body["gpus"]
        assert [each["model"] for each in shown["stuck"]] == ["team/model"]
        gpus[0].stuck.clear()
        ready = await world.get("/readyz")
        assert ready.status == 200


async def test_metrics_count_requests_and_answers() -> None:
    async with leading() as world:
        await serve(world, "r0")
        await serve(world, "r1")
        text = (await world.get("/metrics")).body
        assert 'gpufaas_scheduler_placements_total{result="hit"} 1.0' in text
        assert 'gpufaas_scheduler_requests_ended_total{outcome="completed"} 2.0' in text
        assert 'gpufaas_scheduler_http_requests_total{route="/acquire",status="200"} 2.0' in text
        assert "gpufaas_scheduler_wait_seconds_count 2.0" in text
        assert "gpufaas_scheduler_leading 1.0" in text
        assert 'gpufaas_scheduler_model_placements_total{model="bert",result="hit"} 1.0' in text


async def test_metrics_require_a_token_unless_a_setting_opens_them() -> None:
    async with leading(role=ApiRole.CALLER) as world:
        assert (await world.get("/metrics", headers={"Authorization": ""})).status == 401
        assert (await world.get("/metrics")).status == 200
    async with leading(metrics_auth=False) as world:
        assert (await world.get("/metrics", headers={"Authorization": ""})).status == 200
        assert (await world.get("/healthz", headers={"Authorization": ""})).status == 200


async def test_standby_has_metrics_of_its_own() -> None:
    async with a_world() as world:
        text = (await world.get("/metrics")).body
        assert "gpufaas_scheduler_leading 0.0" in text
        assert (await world.get("/cluster")).status == 503


async def test_api_documents_every_route() -> None:
    async with a_world() as world:
        paths = (await world.get("/openapi.json")).body["paths"]
        verbs = {f"/models/{{model}}/{verb}" for verb in ("pin", "unpin", "prefetch", "evict")}
        shown = {"/policy", "/policies", "/cluster", "/queue", "/models", "/explain/{request}"}
        assert verbs | shown <= paths.keys()
        assert (await world.get("/docs")).status == 200
        answer = await world.get("/nowhere")
        assert (answer.status, answer.body["error"]) == (404, "no-route")
