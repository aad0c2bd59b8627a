"""A template is warmed by the calls of `example.json`, and by nothing else."""

import asyncio
import json
import os
import random
import signal

from gateway_ext.model import FunctionId, Resources
from tests.kit.processes.process_functions import World, call, lines_with, template_text, world
from tests.kit.waiting import eventually

_COUNTS = """
import os, random, threading, time
random.seed(1)
IMPORTED_BY = os.getpid()
CALLS = []
def handle(event, context):
    if event.body == b"fail":
        raise ValueError("an example that fails")
    if event.body == b"thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if event.body == b"exit":
        os._exit(3)
    if event.body == b"wait":
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
    CALLS.append([event.body.decode(), random.random()])
    return {"calls": CALLS, "template": IMPORTED_BY}
"""


FIRST = random.Random(1).random()


def _with_examples(there: World, bodies: list[str]) -> None:
    folder = there.build("f", _COUNTS)
    (folder / "example.json").write_text(json.dumps([{"body": body} for body in bodies]))


async def test_instances_have_what_the_examples_have_made_and_chances_as_after_the_import() -> None:
    async with world() as there:
        _with_examples(there, ["one", "two"])
        f = await there.deploy()
        await eventually(lambda: _is(there, f, "warm"), "a warm template")
        await there.provider.scale(f, 0)
        await there.ready(f, 0)
        await there.provider.scale(f, 1)
        (endpoint,) = await there.ready(f)
        warm = json.loads(await call(endpoint))["calls"]
        assert [body for body, _ in warm] == ["one", "two", ""]
        assert warm[2][1] == FIRST, "a generator that the handler has seeded begins as it did"


async def test_instance_that_was_there_before_the_examples_is_replaced_and_no_call_is_lost() -> (
    None
):
    async with world() as there:
        _with_examples(there, ["wait"])
        gate = there.builds / "gate"
        f = await there.deploy(environment={"GATE": str(gate)})
        (cold,) = await there.ready(f)
        there.heard.drain = asyncio.Event()
        gate.touch()
        await eventually(lambda: there.heard.endpoints[f] not in ([cold], []), "another")
        await eventually(lambda: len(there.heard.endpoints[f]) == 1, "the first one takes no calls")
        (warm,) = there.heard.endpoints[f]
        assert [body for body, _ in json.loads(await call(warm))["calls"]] == ["wait", ""]
        assert [body for body, _ in json.loads(await call(cold))["calls"]] == [""], "it drains"
        assert there.heard.least[f] == 1, "there was one at any time"
        there.heard.drain.set()
        assert cold.exited is not None
        await cold.exited
        assert await there.ready(f) == [warm]


async def _is(there: World, function: FunctionId, text: str) -> bool:
    return (await template_text(there, function)) == text


async def test_template_serves_without_its_examples_when_they_fail() -> None:
    reasons = {"fail": "an example that fails", "thread": "threads", "exit": "ended"}
    for body, why in reasons.items():
        async with world() as there:
            _with_examples(there, [body])
            f = await there.deploy()
            await there.ready(f)
            await eventually(lambda: lines_with(there, f, "is not warm"), "the note")  # noqa: B023 - awaited in this round
            assert await lines_with(there, f, why)
            await there.provider.scale(f, 2)
            endpoints = await there.ready(f, 2)
            for endpoint in endpoints:
                assert len(json.loads(await call(endpoint))["calls"]) == 1
            assert why in (await template_text(there, f)).removeprefix("imported, and not warm: ")


async def test_examples_that_failed_are_not_made_again_when_the_template_starts_again() -> None:
    async with world() as there:
        _with_examples(there, ["fail"])
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        await eventually(lambda: lines_with(there, f, "is not warm"), "the note")
        first = json.loads(await call(endpoint))["template"]

        os.kill(first, signal.SIGKILL)
        await eventually(lambda: lines_with(there, f, "instances start without it"), "its end")
        await there.provider.scale(f, 2)
        templates = {json.loads(await call(one))["template"] for one in await there.ready(f, 2)}
        assert len(templates) == 2
        assert "an example that fails" in await template_text(there, f)
        assert await _notes(there, f, 1)


async def test_examples_that_failed_are_made_again_when_a_secret_has_changed() -> None:
    async with world() as there:
        await there.provider.create_secret("openfaas-fn", "s", b"old")
        _with_examples(there, ["fail"])
        f = await there.deploy(secrets=("s",))
        await there.ready(f)
        await eventually(lambda: _notes(there, f, 1), "the note")
        await there.provider.update_secret("openfaas-fn", "s", b"new")
        await there.provider.scale(f, 2)
        await there.ready(f, 2)
        await eventually(lambda: _notes(there, f, 2), "another note")


async def _notes(there: World, function: FunctionId, count: int) -> bool:
    found = [line for line in await there.log(function) if "is not warm" in line.text]
    return len(found) == count


async def test_calls_that_take_more_memory_than_an_instance_may_are_given_up() -> None:
    async with world() as there:
        folder = there.build("f", _COUNTS.replace("CALLS = []", "CALLS, TAKEN = [], []", 1))
        handler = folder / "handler.py"
        taking = '    if event.body == b"take":\n        TAKEN.append(b"1" * (200 << 20))\n'
        sleeping = "        __import__('time').sleep(1000)\n"
        text = handler.read_text()
        handler.write_text(text.replace("    CALLS.append", f"{taking}{sleeping}    CALLS.append"))
        (folder / "example.json").write_text('{"body": "take"}')
        f = await there.deploy(limits=Resources(memory="100Mi"))
        (endpoint,) = await there.ready(f)
        await eventually(lambda: lines_with(there, f, "is not warm: its calls took"), "the note")
        assert json.loads(await call(endpoint))["calls"][0][0] == ""
        assert (await template_text(there, f)).startswith("imported, and not warm: its calls took")


async def test_calls_have_the_same_limit_when_the_template_they_came_from_is_gone() -> None:
    taking = """
import os, time
def handle(event, context):
    if event.body == b"take":
        while os.path.exists(f"/proc/{TEMPLATE}"):
            time.sleep(0.01)
        taken = bytearray(b"1" * (200 << 20))
        time.sleep(1000)
    return TEMPLATE
TEMPLATE = os.getpid()
"""
    async with world() as there:
        folder = there.build("f", taking)
        (folder / "example.json").write_text('{"body": "take"}')
        f = await there.deploy(limits=Resources(memory="100Mi"))
        (endpoint,) = await there.ready(f)
        os.kill(int(await call(endpoint)), signal.SIGKILL)
        await eventually(lambda: lines_with(there, f, "its calls took"), "the end of the calls")
