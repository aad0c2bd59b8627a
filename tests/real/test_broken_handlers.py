"""Handlers that do not start, as processes: what is known of them, and what heals them."""

from functools import partial

import pytest

from gateway_ext.model import Endpoint
from tests.kit.processes.process_functions import (
    HELLO,
    Heard,
    World,
    call,
    store_otherwise,
    template_text,
    trouble,
    world,
)
from tests.kit.waiting import eventually

pytestmark = pytest.mark.group("real", seconds=60)

BROKEN = {
    "its-syntax": (
        "def handle(event, context)\n",
        "SyntaxError: expected ':' (handler.py, line 1)",
    ),
    "a-package": (
        "import nix\n",
        "ModuleNotFoundError: No module named 'nix' (handler.py, line 1)",
    ),
    "for-terminals": (
        "raise SystemExit('gone\\x1b[2J')\n",
        "SystemExit: gone?[2J (handler.py, line 1)",
    ),
    "no-handle": ("x = 1\n", "handler.py has no function `handle`"),
    "its-end": ("import os\nos._exit(3)\n", "it exited with status 3"),
    "last-words": (
        "import os\nprint('no licence', flush=True)\nos._exit(3)\n",
        "it exited with status 3; last words: no licence",
    ),
}
# What a library does that was built for another processor, after the author's own words.
SEGFAULT = "import ctypes\nprint('about to be silly', flush=True)\nctypes.string_at(0)\n"


def _is_left(there: World, endpoint: Endpoint) -> bool:
    return all(endpoint not in endpoints for endpoints in there.heard.endpoints.values())


async def why(there: World, name: str, **annotations: str) -> str:
    """Wait until the function is known not to start; the reason."""
    ours = {f"com.gpufaas.{key}": value for key, value in annotations.items()}
    function = await there.deploy(name, annotations=ours)
    await eventually(lambda: there.heard.troubles[function].start, f"{name} does not start")
    return there.heard.troubles[function].start


async def test_reason_is_known_at_once_when_a_function_does_not_start() -> None:
    async with world(first_pause_s=30.0) as there:
        for name, (handler, expected) in BROKEN.items():
            there.build(name, handler)
            reason = await why(there, name)
            assert reason.removeprefix("its handler cannot be imported: ") == expected
        log = [line.text for line in await there.log(await there.deploy("a-package"))]
        assert '  File "handler.py", line 1, in <module>' in log, "the author's own line and path"
        assert not [line for line in log if "gateway_ext" in line or str(there.folder) in line]


@pytest.mark.parametrize("template", ["true", "false"])
async def test_reason_is_known_at_once_when_a_function_has_several_workers(template: str) -> None:
    async with world(first_pause_s=30.0) as there:
        for name, (handler, expected) in BROKEN.items():
            if name != "its-end":  # without a word of its own there is the runtime's alone
                there.build(name, handler)
                reason = await why(there, name, workers="2", template=template)
                assert reason.removeprefix("its handler cannot be imported: ") == expected


async def test_signal_is_named_before_last_words_when_an_import_is_ended_by_it() -> None:
    async with world(first_pause_s=0.1, template_bytes=0) as there:
        there.build("f", SEGFAULT)
        reason = await why(there, "f")
        assert reason == "it was ended by SIGSEGV; last words: about to be silly"
        log = [line.text for line in await there.log(await there.deploy("f", update=True))]
        assert "this instance was ended by SIGSEGV; the next one starts in 0.1 s" in log
        assert [line for line in log if "(2 times), in the same way as before; last words" in line]


@pytest.mark.parametrize("template", ["true", "false"])
async def test_function_is_broken_when_its_workers_are_ended_by_a_signal_before_they_are_ready(
    template: str,
) -> None:
    async with world(first_pause_s=30.0) as there:
        there.build("f", SEGFAULT)
        reason = await why(there, "f", workers="2", template=template)
        assert reason.startswith("it exited with status 139; last words: worker ")
        assert reason.endswith(" was ended by SIGSEGV again before it was ready")


async def test_function_is_watched_when_instances_die_again_and_again_and_its_log_says_how() -> (
    None
):
    die = "import os\ndef handle(event, context):\n    os.kill(os.getpid(), int(event.path[1:]))\n"
    async with world(first_pause_s=0.0) as there:
        there.build("f", die)
        f = await there.deploy("f")
        for number, name in ((11, "SIGSEGV"), (9, "SIGKILL"), (35, "signal 35")):
            (endpoint,) = await there.ready(f)
            assert await call(endpoint, f"/{number}") == b""
            assert endpoint.exited is not None
            assert await endpoint.exited == f"was ended by {name}"
            await eventually(partial(_is_left, there, endpoint), "it takes no calls")
        await eventually(lambda: there.heard.troubles[f].dying, "the trouble")
        assert there.heard.troubles[f].dying == "was ended by signal 35 (3 times)"
        await trouble(there.provider, f, "was ended by signal 35 (3 times)")
        log = [line.text for line in await there.log(f)]
        assert [line for line in log if line.startswith("this instance was ended by SIGSEGV; ")]


async def test_function_is_waited_for_again_as_soon_as_it_is_deployed_again() -> None:
    async with world(first_pause_s=30.0) as there:
        there.build("f", "import nix\n")
        await why(there, "f")
        there.build("f", HELLO)
        f = await there.deploy("f", update=True)
        assert not there.heard.troubles[f].start, "the next version may be fine"
        await there.ready(f)


async def test_older_version_serves_while_the_newer_one_does_not_start() -> None:
    async with world(first_pause_s=30.0) as there:
        there.build("f", HELLO)
        f = await there.deploy("f")
        (endpoint,) = await there.ready(f)
        there.build("f", "import nix\n")
        await there.deploy("f", update=True)
        await eventually(lambda: there.heard.troubles[f].partly, "the newer one does not start")
        assert there.heard.endpoints[f] == [endpoint]
        await there.provider.scale(f, 0)
        assert not there.heard.troubles[f].start, "the older one serves the next call"


async def test_next_start_is_waited_for_when_it_succeeds_without_a_deployment() -> None:
    async with world() as there:
        there.build("f", "import os\nos.stat('there')\n" + HELLO)
        await why(there, "f")
        (next((there.state / "functions").glob("f.*/build-*")) / "there").touch()
        (f,) = there.heard.endpoints
        await there.ready(f)
        assert not there.heard.troubles[f].start


async def test_other_functions_start_when_what_is_stored_of_one_is_refused_by_now(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as there:
        for name in ("f", "other"):
            there.build(name, HELLO)
        f = await there.deploy("f", labels={"com.openfaas.scale.target": "5"})
        other = await there.deploy("other")
        await there.ready(other)
        await there.provider.close()
        store_otherwise(there.state, f, '"5"', '"+5"')
        there.heard, there.provider = Heard(), there.new_provider()
        await there.provider.start(there.heard)
        await there.ready(other)
        await trouble(there.provider, f, "deploy it again")
        assert "f.openfaas-fn: it is not served: com.openfaas.scale.target: '+5'" in caplog.text
        await there.deploy("f", update=True)
        await there.ready(f)


async def test_template_is_in_trouble_when_its_example_is_not_answered_well() -> None:
    async with world() as there:
        handler = "def handle(event, context):\n    return {'statusCode': 400}\n"
        (there.build("f", handler) / "example.json").write_text('{"body": {}}')
        f = await there.deploy("f")
        expected = "call 1 of example.json was answered 400"
        await eventually(lambda: there.heard.troubles[f].template == expected, "the trouble")
        assert expected in await template_text(there, f)
        await there.ready(f)
        status = await there.provider.function(f, usage=False)
        assert (status.trouble, status.available_replicas) == (expected, 1)
