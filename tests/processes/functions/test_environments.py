"""Environments of functions: their packages, made once, failing loudly, removed when unused."""

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from gateway_ext.providers.process import python_environments
from gateway_ext.providers.process.python_environments import PythonEnvironments
from tests.kit.processes.offline_packages import offline
from tests.kit.processes.process_functions import World, call, trouble, world
from tests.kit.waiting import PATIENCE_S, eventually

USES = "import tiny_thing\ndef handle(event, context):\n    return tiny_thing.SAYS\n"
SEES = """
import importlib.util
def handle(event, context):
    return [name for name in event.query.getlist("m") if importlib.util.find_spec(name)]
"""


def environments_of(there: World) -> PythonEnvironments:
    folder = there.state / "envs"
    return PythonEnvironments(there.settings, there.bounds, folder, users=None, mark="mark")


def environments(there: World) -> list[Path]:
    return list((there.state / "envs").iterdir())


async def test_requirements_are_installed_logged_kept_and_removed() -> None:
    async with world() as there:
        await offline(there)
        there.build("f", USES, "# what it needs\ntiny-thing==1.0\n")
        there.build("g", USES, "tiny-thing==1.0  # the same\n")
        f = await there.deploy("f")
        assert not there.heard.endpoints[f], "deploying does not wait for pip"
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"tiny"
        assert any("Successfully installed" in line.text for line in await there.log(f))
        g = await there.deploy("g")
        await there.ready(g)
        assert not any("install" in line.text for line in await there.log(g))
        assert len(environments(there)) == 1
        await there.provider.remove(f)
        there.build("g", "def handle(event, context):\n    return 'bare'\n")
        await there.deploy("g", update=True)
        await eventually(lambda: len(there.heard.endpoints[g]) == 1, "the update")
        await eventually(lambda: _only_bare(there), "the end of unused environments")


async def test_failure_to_install_is_in_the_status_and_the_log_and_can_be_mended() -> None:
    async with world() as there:
        await offline(there)
        there.build("f", requirements="there-is-no-such-thing==9\n")
        f = await there.deploy("f")

        async def trouble() -> str:
            return (await there.provider.function(f, usage=False)).trouble

        await eventually(trouble, "the trouble of the environment")
        assert "there-is-no-such-thing" in await trouble()
        assert "there-is-no-such-thing" in there.heard.troubles[f].start
        assert any("there-is-no-such-thing" in line.text for line in await there.log(f))
        assert environments(there) == []
        there.build("f")
        await there.deploy("f", update=True)
        assert not there.heard.troubles[f].start, "what was mended is waited for"
        await there.ready(f)
        assert await trouble() == ""


async def test_function_sees_the_gateways_packages_but_not_the_source_tree() -> None:
    async with world() as there:
        there.build("f", SEES)
        f = await there.deploy("f")
        (endpoint,) = await there.ready(f)
        names = "&m=".join(["torch", "msgspec", "scheduler", "gpu_manager", "tests"])
        assert await call(endpoint, f"/?m={names}") == b'["torch", "msgspec"]'


async def test_name_depends_on_what_is_meant_and_on_who_means_it() -> None:
    async with world() as there:
        made = environments_of(there)

        def name_of(requirements: bytes, namespace: str = "dev") -> str:
            return made.name_of(namespace, requirements)

        assert name_of(b"a\nb\n") == name_of(b"\n# x\na  # y\nb")
        assert name_of(b"torch\nMsgSpec\n") == name_of(b""), "the gateway has both"
        assert name_of(b"torch==1.0\n") != name_of(b"")
        assert name_of(b"a\n") != name_of(b"b\n")
        assert name_of(b"") == name_of(b"# nothing\n")
        assert name_of(b"a\n") != name_of(b"a\n", "another")
        assert name_of(b"torch\n") == name_of(b"", "another")


async def test_environments_that_come_and_go_leave_no_lock_behind() -> None:
    async with world() as there:
        made = environments_of(there)
        before = locks()
        for number in range(20):
            namespace, requirements = f"ns-{number}", b"there-is-no-such-thing==9\n"
            folder = there.state / "envs" / made.name_of(namespace, requirements)
            folder.mkdir(parents=True)
            (folder / ".made").touch()
            assert await made.ready(namespace, requirements, print) == folder / "bin" / "python"

        assert locks() - before < 10


async def test_environment_of_a_new_function_stays_when_two_prunings_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove = python_environments._remove  # noqa: SLF001 - the disk is slow
    begun, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        remove(folder)

    async with world() as there:
        made = environments_of(there)
        requirements = {
            made.name_of("openfaas-fn", f"thing-{n}\n".encode()): f"thing-{n}\n" for n in range(5)
        }
        for name in ("f", "g"):
            there.build(name)
            await there.ready(await there.deploy(name))
        for name in requirements:
            (there.state / "envs" / name).mkdir()
            (there.state / "envs" / name / ".made").touch()
        last = [one for one in environments(there) if one.name in requirements][-1]
        monkeypatch.setattr(python_environments, "_remove", slowly)
        f, g = there.heard.endpoints
        await there.provider.remove(f)
        await eventually(begun.is_set, "the first pruning")

        there.build("new", requirements=requirements[last.name])
        await trouble(there.provider, await there.deploy("new"), "exited with")
        await there.provider.remove(g)
        functions = there.state / "functions"
        await eventually(lambda: len(list(functions.iterdir())) == 1, "the end of the second one")
        await asyncio.sleep(0.2)  # for the second pruning
        go_on.set()
        await eventually(lambda: environments(there) == [last], "the end of the others")


def locks() -> int:
    return sum(type(each) is asyncio.Lock for each in gc.get_objects())


def _has(folder: Path, name: str) -> bool:
    """Whether a file of this name is in it; `Path.glob` fails where folders go meanwhile."""
    return any(name in files for _, _, files in os.walk(folder))


def _only_bare(there: World) -> bool:
    installed = [one for one in environments(there) if _has(one, "tiny_thing.py")]
    return not installed and len(environments(there)) == 1
