"""Instances that are stopped by a signal are replaced; those with a slow handler are not."""

from gateway_ext.providers.process import function
from tests.kit.processes.process_functions import call, marked, world
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import eventually

# It blocks the event loop of its handler, as many do that are only slow.
SLOW = """
import time
async def handle(event, context):
    time.sleep(float(event.query.get("s", 0)))
    return "done"
"""


async def test_stopped_instance_is_killed_and_replaced_and_the_log_says_so() -> None:
    async with world() as there:
        there.build("f")
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        stop(marked(endpoint.instance)[0])
        await eventually(lambda: endpoint not in there.heard.endpoints[f], "its end")
        (other,) = await there.ready(f)
        assert await call(other) == b"hello"
        lines = [line.text for line in await there.log(f) if line.instance == endpoint.instance]
        assert any("was stopped by a signal" in line for line in lines), lines


async def test_instance_lives_while_its_handler_blocks_it() -> None:
    async with world() as there:
        there.build("f", SLOW)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        slow_s = 1.5 * function.LIVENESS.stopped_s
        assert await call(endpoint, f"/?s={slow_s}") == b"done"
        assert there.heard.endpoints[f] == [endpoint]
