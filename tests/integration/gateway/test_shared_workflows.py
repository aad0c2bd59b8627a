"""Gateways that share a queue share their workflows: deployed, replaced, removed at any of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import nats
import pytest

from gateway_ext.errors import QueueAway
from gateway_ext.shared_jobs.store import JetStream, encode
from gateway_ext.workflows.plan import WorkflowId, read_workflow
from gateway_ext.workflows.table import SharedWorkflows, Workflows
from tests.kit.engines.nats_servers import NatsServer, messages, nats_server, settings_for
from tests.kit.fakes.fake_function import says
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import LOG
from tests.kit.worlds.workflow_world import WorkflowWorld, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

ONE = "  only: {function: a}\n"
OTHER = "  only: {function: b}\n"
FUNCTIONS = {"a": says(b"from a"), "b": says(b"from b")}


@asynccontextmanager
async def gateways(
    folder: Path, server: NatsServer, many: int = 2
) -> AsyncIterator[list[WorkflowWorld]]:
    """Gateways with the same functions and one queue, each with a folder of its own."""
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(
                workflow_world(folder / str(number), FUNCTIONS, queue=server.url)
            )
            for number in range(many)
        ]


async def until_answer(flows: WorkflowWorld, answer: object, path: str = "/workflow/w") -> None:
    async def is_answer() -> bool:
        said = await flows.call(path=path)
        return answer in {said.status, said.body}

    await eventually(is_answer, f"{path} answers {answer}")


async def names(flows: WorkflowWorld) -> list[str]:
    found = (await flows.world.get("/system/workflows")).body
    return [one["name"] for one in found]


def shared(server: NatsServer) -> JetStream:
    return JetStream(settings_for(server.url))


def is_read(workflows: Workflows) -> bool:
    try:
        return workflows.by_path(b"nobody") is None
    except QueueAway:
        return False


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "workflows").iterdir())


async def test_workflow_is_known_replaced_and_removed_by_all(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server) as (one, other):
            assert (await one.deploy(ONE)).status == 202
            assert (await one.call()).body == "from a", "the one that was asked knows it at once"
            await until_answer(other, "from a")
            assert (await other.deploy(OTHER, method="PUT")).status == 202
            assert (await other.call()).body == "from b"
            await until_answer(one, "from b")
            removal = {"workflowName": "w"}
            assert (await one.world.ask("DELETE", "/system/workflows", removal)).status == 202
            assert (await one.call()).status == 404
            await until_answer(other, 404)
            assert (await other.deploy(ONE, method="PUT")).status == 404
            assert (await other.world.ask("DELETE", "/system/workflows", removal)).status == 404
            # A file goes a moment after its workflow.
            await eventually(
                lambda: kept(tmp_path / "0") == kept(tmp_path / "1") == [], "no file is left"
            )


async def test_workflows_of_a_namespace_are_removed_for_all(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server) as (one, other):
            for flows in (one, other):
                await flows.world.ask("POST", "/system/namespace/team", {"name": "team"})
                assert (await flows.world.deploy("a", namespace="team")).status == 202
            head = "workflow: w\nnamespace: team"
            assert (await one.deploy(ONE, head)).status == 202
            await until_answer(other, "from a", "/workflow/w.team")
            said = await other.world.ask("DELETE", "/system/namespace/team", {"name": "team"})
            assert said.status == 202
            await until_answer(one, 404, "/workflow/w.team")


async def test_changes_at_both_at_once_end_the_same_everywhere(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server, 3) as all_of_them:
            first, second, third = all_of_them
            changes = [
                flows.deploy(stages, f"workflow: w\nslo_ms: {1000 + turn}")
                for turn in range(10)
                for flows, stages in ((first, ONE), (second, OTHER))
            ]
            assert {said.status for said in await asyncio.gather(*changes)} == {202}
            # What is deployed afterwards comes after all of these, in every gateway.
            assert (await third.deploy(ONE, "workflow: last")).status == 202

            async def have_read() -> bool:
                found = [await names(flows) for flows in all_of_them]
                return all(each == ["last", "w"] for each in found)

            await eventually(have_read, "all have read all")
            shown = [
                (await flows.world.get("/system/workflow/w")).body["text"] for flows in all_of_them
            ]
            assert len(set(shown)) == 1


async def test_gateway_serves_what_it_knew_while_the_servers_are_away(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server, 1) as (flows,):
            assert (await flows.deploy(ONE)).status == 202
            server.kill()

            async def is_refused() -> bool:
                return (await flows.deploy(OTHER)).status == 503

            await eventually(is_refused, "no change is accepted")
            assert (await flows.call()).body == "from a"
            assert (await flows.call(path="/workflow/gone")).status == 404
        async with gateways(tmp_path, server, 1) as (flows,):
            assert (await flows.call()).body == "from a", "its copy serves"
            for path in ("/workflow/other", "/async-workflow/other"):
                said = await flows.call(path=path)
                assert (said.status, "retry-after" in said.headers) == (503, True), path
            server.start()
            await until_answer(flows, 404, "/workflow/other")
            await until_answer(flows, "from a")


async def test_gateway_that_was_away_learns_what_was_removed(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server) as (one, other):
            for name in ("stays", "goes"):
                assert (await one.deploy(ONE, f"workflow: {name}")).status == 202
            await until_answer(other, "from a", "/workflow/goes")
        async with gateways(tmp_path, server, 1) as (one,):
            await one.world.ask("DELETE", "/system/workflows", {"workflowName": "goes"})
            await forget_marks(server)
        async with gateways(tmp_path, server) as (_, other):
            assert await names(other) == ["stays"]
            await eventually(lambda: kept(tmp_path / "1") == ["stays.openfaas-fn.yml"])


async def forget_marks(server: NatsServer) -> None:
    """Delete the message at the subject of `goes`, as gateways do after a minute."""
    client = await nats.connect(server.url)
    stream, subject = "gpufaas_workflows", "gpufaas.workflows.deployed.openfaas-fn.goes"
    try:
        found = await client.jetstream().get_last_msg(stream, subject)
        assert b"null" in (found.data or b"")
        assert await client.jetstream().delete_msg(stream, found.seq or 0)
    finally:
        await client.close()
    assert subject not in await messages(server, stream)


async def test_refused_file_is_shared_with_new_servers_and_goes_when_others_removed_it(
    tmp_path: Path,
) -> None:
    stored = tmp_path / "workflows" / "goes.openfaas-fn.yml"
    stored.parent.mkdir()
    stored.write_text("workflow: goes")

    async def left_out(server: NatsServer) -> set[str]:
        workflows = Workflows(stored.parent)
        workflows.open()
        async with shared(server).texts("workflows", workflows, tmp_path / "copied", LOG):
            await eventually(lambda: is_read(workflows), "the stream is read")
        return set(workflows.refused)

    with nats_server(tmp_path / "nats") as server:
        for _ in range(2):  # the second time, it has a copy of this stream
            assert await left_out(server) == {"goes.openfaas-fn"}
            assert stored.exists()
        client = await nats.connect(server.url)
        subject = "gpufaas.workflows.deployed.openfaas-fn.goes"
        await client.jetstream().publish(subject, encode(None))
        await client.close()
        await forget_marks(server)
        assert await left_out(server) == set()
        assert not stored.exists()


async def test_marks_of_removed_workflows_are_deleted_and_what_cannot_be_read_stays(
    tmp_path: Path,
) -> None:
    deployed = "gpufaas.workflows.deployed.openfaas-fn."
    with nats_server(tmp_path / "nats") as server:
        workflows = Workflows(tmp_path / "workflows")
        texts = shared(server).texts("workflows", workflows, tmp_path / "copied", LOG)
        async with texts as stream:
            changes = SharedWorkflows(workflows, stream)
            for name in ("stays", "goes"):
                plan = read_workflow(f"workflow: {name}\nstages:\n{ONE}")
                await changes.deploy(plan, update=False)
            client = await nats.connect(server.url)
            for name, content in (("stays", b'{"v": 99}'), ("odd", b"{"), ("goes", b"")):
                await client.jetstream().publish(deployed + name, content)
            await client.close()
            await changes.remove(WorkflowId("openfaas-fn", "goes"))

            async def is_deleted() -> bool:
                return deployed + "goes" not in await messages(server, "gpufaas_workflows")

            await eventually(is_deleted, "the mark is deleted")
            assert [plan.id.name for plan in workflows] == ["stays"], "as it was last read"
            assert {deployed + "stays", deployed + "odd"} < set(
                await messages(server, "gpufaas_workflows")
            )


async def test_workflows_of_a_single_gateway_are_shared_once_it_has_a_queue_with_others(
    tmp_path: Path,
) -> None:
    async with workflow_world(tmp_path / "1", FUNCTIONS) as alone:
        await alone.deploy(ONE, "workflow: mine")
        await alone.deploy(ONE, "workflow: both")
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server, 1) as (one,):
            assert (await one.deploy(OTHER, "workflow: both")).status == 202
        async with gateways(tmp_path, server) as (one, other):
            await until_answer(one, "from a", "/workflow/mine")
            assert (await other.call(path="/workflow/both")).body == "from b", "it was there first"
        async with gateways(tmp_path, server, 1) as (one,):
            await one.world.ask("DELETE", "/system/workflows", {"workflowName": "mine"})
        async with gateways(tmp_path, server) as (one, other):
            assert await names(one) == await names(other) == ["both"], "it is not shared again"


async def test_new_servers_get_what_the_gateways_have(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with gateways(tmp_path, server) as (one, other):
            assert (await one.deploy(ONE)).status == 202
            await until_answer(other, "from a")
    with nats_server(tmp_path / "new") as server:
        async with gateways(tmp_path, server) as (one, other):
            assert (await one.call()).body == (await other.call()).body == "from a"
            assert "gpufaas.workflows.deployed.openfaas-fn.w" in await messages(
                server, "gpufaas_workflows"
            )
