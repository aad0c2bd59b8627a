"""The docker provider when something fails halfway: nothing is lost, left or held up by it."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.time_limits import time_limit
from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from tests.kit.fakes.fake_engine import IMAGE
from tests.kit.waiting import eventually
from tests.unit.gateway_ext.providers.docker.docker_world import F, World, world

SECOND = {"Id": "sha256:2", "Config": {"Labels": None}}


def record_of(there: World) -> Path:
    (found,) = (there.folder / "state").rglob("*.json")
    return found


async def trouble_of(there: World) -> str:
    return (await there.provider.function(F, usage=False)).trouble


def count(there: World, is_one: Callable[[str], bool]) -> int:
    return sum(map(is_one, there.engine.asked))


def fills(there: World) -> int:
    return count(there, lambda one: one.startswith("PUT ") and one.endswith("/archive"))


async def test_surplus_of_replicas_ends_when_the_gateway_was_killed_while_scaling(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        await there.provider.scale(F, 3)
        names = await there.ready(3)
        await there.provider.close()
        path = record_of(there)
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "wanted": 1}))
        await there.another().start(there.heard)
        await eventually(lambda: len(there.engine.containers) == 1)
        (left,) = await there.ready()
        assert left in names


async def test_surplus_of_a_coming_version_ends_when_the_gateway_was_killed_while_scaling(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        await there.provider.scale(F, 2)
        await there.ready(2)
        await there.provider.close()
        path = record_of(there)
        kept = json.loads(path.read_bytes())
        before = {**kept["release"], "id": "0" * 12}
        path.write_text(json.dumps({**kept, "before": before, "wanted": 1}))
        await there.another().start(there.heard)
        await eventually(lambda: len(there.engine.containers) == 1)
        await eventually(lambda: len(there.heard.endpoints[F]) == 1)
        assert json.loads(path.read_bytes())["before"] is None


async def test_old_version_ends_when_its_end_cannot_be_saved(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.images["f:2"] = SECOND
        await there.deploy()
        (first,) = await there.ready()
        there.engine.failing["POST containers/create"] = (500, "not yet")
        await there.deploy("f:2", update=True)
        await there.trouble("not yet")
        shutil.rmtree(record_of(there).parent)
        there.engine.failing.clear()
        await eventually(lambda: first not in there.engine.containers)
        (second,) = await there.ready()
        assert list(there.engine.containers) == [second]
        assert await trouble_of(there) == ""


async def test_image_is_asked_for_again_when_its_registry_fails_after_the_answer(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(pull_answer_s=0.0).start(there.heard)
        there.engine.failing["POST images/create"] = (500, "no such host")
        await there.deploy("x:1")
        await there.trouble("image x:1 cannot be pulled: no such host; it is tried again in")
        assert "no such host" in there.heard.troubles[F].start
        there.engine.failing.clear()
        there.engine.pulled = {"x:1": IMAGE}
        await there.ready()
        assert await trouble_of(there) == there.heard.troubles[F].start == ""


async def test_pull_is_given_up_when_it_makes_no_progress(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(pull_quiet_s=0.2).start(there.heard)
        there.engine.pulls = [{"status": "Downloading"}]
        there.engine.pull_ends.clear()
        answer = "image x:1 cannot be pulled: no progress for 0.2 s"
        with pytest.raises(ProviderFailed, match=answer):
            await there.deploy("x:1")


@pytest.mark.parametrize("size", [600 << 10, 3 << 20])
async def test_death_is_noticed_at_once_when_a_long_event_came_before(
    tmp_path: Path, size: int
) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        received = count(there, "GET events".__eq__)
        there.engine.says({"name": "other", "label": "x" * size})
        there.engine.dies(first)
        await there.trouble("exited with status 1")
        assert count(there, "GET events".__eq__) == received  # by the same stream


async def test_long_event_is_understood_up_to_a_bound(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        there.engine.containers[first]["State"] = {"Running": False, "ExitCode": 7}
        there.engine.says({"name": first, "label": "x" * (900 << 10), "exitCode": "7"})
        await there.trouble("exited with status 7")


async def test_gateway_starts_and_looks_again_when_an_answer_makes_no_sense(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        await there.provider.close()
        there.engine.failing["GET containers/json"] = (200, "this is no list")
        async with time_limit(30):
            await there.another().start(there.heard)
        assert there.heard.endpoints[F] == []
        there.engine.failing.clear()
        assert await there.ready() == [first]


async def test_gateway_starts_when_what_is_nobodys_cannot_be_removed_quickly(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        labels = {"com.gpufaas.function": "old.openfaas-fn"}
        there.engine.containers["stray"] = {"Config": {"Labels": labels}, "State": {}}
        there.engine.held["DELETE containers/stray"] = asyncio.Event()
        async with time_limit(30):
            await there.another().start(there.heard)
            await there.deploy()
        (name,) = await there.ready()
        await eventually(lambda: list(there.engine.containers) == [name])


async def test_container_continues_when_it_starts_while_the_engine_lists_all(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        before = count(there, "GET containers/json".__eq__)
        looks = count(there, "GET volumes".__eq__)  # the last thing of each look
        given = there.engine.held["GET containers/json"] = asyncio.Event()
        there.engine.break_off()
        await eventually(lambda: count(there, "GET containers/json".__eq__) > before)
        await there.deploy()
        (name,) = await there.ready()
        given.set()
        await eventually(lambda: count(there, "GET volumes".__eq__) > looks)
        assert await there.ready() == [name]
        assert there.heard.least[F] == 1
        assert await trouble_of(there) == ""


async def test_secret_reaches_every_function_it_can_and_the_others_with_their_next_start(
    tmp_path: Path,
) -> None:
    other = FunctionId(F.namespace, "g")

    async with world(tmp_path) as there:
        await there.provider.create_secret(F.namespace, "key", b"old")
        await there.deploy(secrets=("key",))
        await there.provider.deploy(Deployment(other, "f:1", secrets=("key",)), update=False)
        (name,) = await there.ready()
        await eventually(lambda: there.heard.endpoints.get(other))
        assert fills(there) == 2
        there.engine.failing["POST volumes/create"] = (500, "no space left")
        with pytest.raises(ProviderFailed, match="no space left"):
            await there.provider.update_secret(F.namespace, "key", b"new")
        assert count(there, "POST volumes/create".__eq__) == 4
        there.engine.failing.clear()
        there.engine.dies(name)
        await there.replaced(name)
        assert fills(there) == 3


async def test_filler_stays_when_the_engine_is_looked_at_while_it_is_used(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.provider.create_secret(F.namespace, "key", b"value")
        written = there.engine.held["/archive"] = asyncio.Event()
        await there.deploy(secrets=("key",))
        await eventually(lambda: fills(there))
        looks = count(there, "GET volumes".__eq__)  # the last thing of each look
        there.engine.break_off()
        await eventually(lambda: count(there, "GET volumes".__eq__) > looks)
        (filler,) = there.engine.containers
        assert "-filler-" in filler
        written.set()
        (name,) = await there.ready()
        assert list(there.engine.containers) == [name]


async def test_output_is_read_on_when_the_engine_has_refused_it_for_a_while(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (name,) = await there.ready()

        there.engine.failing[f"GET containers/{name}/logs"] = (500, "driver is busy")
        await eventually(there.log_texts, "the refusal in the log")
        content = b"2026-01-02T03:04:05.5Z hello\n"
        there.engine.output = b"\1\0\0\0" + len(content).to_bytes(4, "big") + content
        await there.output_read(1)  # it is refused once more
        there.engine.failing.clear()
        await there.output_read(2)
        assert await there.log_texts() == ["its output cannot be read: driver is busy", "hello"]


async def test_instance_becomes_ready_when_its_first_answer_was_an_endless_line(
    tmp_path: Path,
) -> None:
    answers = [b"x" * (200 << 10)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop() if answers else b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with world(tmp_path) as there:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await there.provider.close()
            port = server.sockets[0].getsockname()[1]
            await there.another(port=port).start(there.heard)
            await there.deploy()
            await there.ready()
            assert not answers
