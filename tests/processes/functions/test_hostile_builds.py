"""Packages whose installation attacks others: what it leaves behind, and what it may use."""

import asyncio
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import pytest

from gateway_ext.model import FunctionId, Namespace
from gateway_ext.providers.process import processes
from tests.kit.processes.offline_packages import add_source, offline
from tests.kit.processes.process_functions import call, trouble, world
from tests.kit.waiting import eventually

pytestmark = pytest.mark.group("hostile_builds", seconds=100)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: builds get users of their own")

# It leaves session and environment, and writes wherever it can into the environments of others.
DAEMON = """
def act():
    import subprocess, sys
    program = '''
import os, pathlib, time
while True:
    for packages in pathlib.Path({envs!r}).glob("*/lib/python*/site-packages"):
        try:
            (packages / "planted.pth").write_text("import os; os.environ['PLANTED'] = '1'")
        except OSError:
            pass
    time.sleep(0.001)
'''
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, {name!r}], start_new_session=True, env={{}},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
"""
# Every process of it forks the next one and ends: a list of processes never shows it.
CHASE = """
def act():
    import os
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    while True:
        if os.fork():
            os._exit(0)
"""
ASK = """
import os
def handle(event, context):
    return os.environ.get("PLANTED", "nothing")
"""
REPORT = "def act():\n    import pathlib, os, sys\n    sys.exit({what})\n"


def processes_named(name: str) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                arguments = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if name.encode() in arguments:
                found.append(int(path.name))
    return found


@as_root
async def test_daemon_of_one_build_reaches_no_other_functions_environment() -> None:
    async with world() as there:
        links, name = await offline(there), token_hex(8)
        add_source(links, "hostile", DAEMON.format(envs=str(there.state / "envs"), name=name))
        await there.provider.create_namespace(Namespace("mallory"))
        there.build("a", ASK, "hostile\n")
        a = await there.deploy("a", id=FunctionId("mallory", "a"))
        await there.ready(a)
        assert processes_named(name) == [], "the daemon outlived its build"
        there.build("b", ASK, "tiny-thing\n")
        b = await there.deploy("b")
        (endpoint,) = await there.ready(b)
        assert await call(endpoint) == b"nothing"
        for folder in (there.state / "envs").iterdir():
            owners = {path.lstat().st_uid for path in (folder, *folder.rglob("*"))}
            assert owners == {0}


@as_root
async def test_build_has_ended_even_if_it_forks_faster_than_one_can_look() -> None:
    async with world() as there:
        there.bounds = replace(there.bounds, first_build_uid=61_900, build_uids=50)
        links = await offline(there)
        add_source(links, "hostile", CHASE)
        there.build("a", ASK, "hostile\n")
        await there.ready(await there.deploy("a"))
        assert not processes.users() & set(range(61_900, 61_950))


@as_root
async def test_build_sees_no_shared_folder_and_no_secret_of_others() -> None:
    async with world() as there:
        links = await offline(there)
        shared = Path("/tmp") / f"shared-{token_hex(8)}"
        shared.write_text("everybody's")
        try:
            looks = f"{{p: os.path.exists(p) for p in ({str(shared)!r}, {str(links)!r})}}"
            add_source(links, "hostile", REPORT.format(what=f"str({looks})"))
            there.build("a", ASK, "hostile\n")
            a = await there.deploy("a")
            await trouble(there.provider, a, "cannot be made")
            text = "\n".join(line.text for line in await there.log(a))
            assert f"'{shared}': False" in text
            assert f"'{links}': True" in text
        finally:
            shared.unlink()


@pytest.mark.parametrize(
    ("limits", "act", "why"),
    [
        ({"build_timeout_s": 3.0}, "__import__('time').sleep(1000)", "takes longer than 3 s"),
        ({"build_memory_bytes": 256 << 20}, "len(bytearray(1 << 30))", "MemoryError"),
        (
            {"build_disk_bytes": 64 << 20},
            "open('large', 'wb').truncate(1 << 30)",
            "File too large",
        ),
    ],
    ids=["time", "memory", "disk"],
)
async def test_build_is_ended_when_it_uses_too_much(
    limits: dict[str, float], act: str, why: str
) -> None:
    async with world() as there:
        links = await offline(there, **limits)
        add_source(links, "hostile", f"def act():\n    {act}\n")
        there.build("a", ASK, "hostile\n")
        a = await there.deploy("a")
        await trouble(there.provider, a, "its environment")

        async def is_told() -> bool:
            return any(why in line.text for line in await there.log(a))

        await eventually(is_told, f"the reason {why!r}")
        assert list((there.state / "envs").iterdir()) == []


async def test_small_files_of_a_build_count_together() -> None:
    fill = """
    def act():
        for number in range(100):
            with open(f"{sys.prefix}/{number}", "wb") as file:
                file.write(bytes(1 << 20))
    """
    async with world() as there:
        links = await offline(there, build_disk_bytes=32 << 20)
        add_source(links, "hostile", fill)
        there.build("a", ASK, "hostile\n")
        a = await there.deploy("a")
        await trouble(there.provider, a, "MiB of disk, 32 MiB are the most")


@as_root
async def test_build_cannot_fork_without_end() -> None:
    forks = """
    def act():
        import subprocess
        for number in range(1000):
            subprocess.Popen(["/bin/sleep", "1000"], stdout=-3, stderr=-3)  # both closed
    """
    async with world() as there:
        there.bounds = replace(there.bounds, build_processes=64)
        links = await offline(there)
        add_source(links, "hostile", forks)
        there.build("a", ASK, "hostile\n")
        a = await there.deploy("a")
        await trouble(there.provider, a, "cannot be made")
        assert any("Resource temporarily unavailable" in o.text for o in await there.log(a))


@pytest.mark.parametrize("network", [True, False])
async def test_build_has_a_network_only_where_the_setting_says_so(*, network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        calls = f"""
        def act():
            import socket
            try:
                socket.create_connection(("127.0.0.1", {port}), 5).close()
            except OSError as error:
                sys.exit(f"no way: {{error}}")
            sys.exit("connected")
        """
        async with world() as there:
            links = await offline(there, build_network=network)
            add_source(links, "hostile", calls)
            there.build("a", ASK, "hostile\n")
            a = await there.deploy("a")
            await trouble(there.provider, a, "cannot be made")
            text = "\n".join(line.text for line in await there.log(a))
            assert ("connected" in text, "no way" in text) == (network, not network)


@as_root
async def test_what_a_killed_gateways_build_left_is_ended_and_deleted_at_the_next_start() -> None:
    async with world() as there:
        await there.provider.close()
        uid = 61_970
        there.bounds = replace(there.bounds, first_build_uid=61_950, build_uids=50)
        left = there.state / "envs" / "unfinished"
        left.mkdir()
        (left / ".made").touch()
        os.chown(left, uid, uid)
        with subprocess.Popen(["sleep", "1000"], user=uid) as p:
            there.provider = there.new_provider()
            await there.provider.start(there.heard)
            assert await asyncio.to_thread(p.wait, 10) == -9
        assert not left.exists()


async def test_builds_of_one_namespace_leave_turns_for_others() -> None:
    async with world() as there:
        links = await offline(there, builds_at_once=2)
        add_source(links, "slow", "def act():\n    __import__('time').sleep(1000)\n")
        await there.provider.create_namespace(Namespace("greedy"))
        for number in range(3):
            there.build(f"s{number}", ASK, f"# {number}\nslow\ntiny-thing=={number}\n")
            await there.deploy(f"s{number}", id=FunctionId("greedy", f"s{number}"))
        there.build("b", ASK, "tiny-thing\n")
        await there.ready(await there.deploy("b"))


@as_root
async def test_root_follows_no_link_that_a_build_left() -> None:
    leave = """
    def act():
        mark = f"{{sys.prefix}}/.made"
        if not os.path.lexists(mark):
            os.symlink({outside!r}, mark)
            os.symlink({folder!r}, f"{{sys.prefix}}/folder")
    """
    async with world() as there:
        links = await offline(there)
        folder = there.folder / "outside"
        folder.mkdir(mode=0o700)
        (folder / "file").write_text("root's")
        outside = folder / "made by root"
        add_source(links, "hostile", leave.format(outside=str(outside), folder=str(folder)))
        there.build("a", ASK, "hostile\n")
        await there.ready(await there.deploy("a"))
        assert [path.name for path in folder.iterdir()] == ["file"]
        assert folder.stat().st_uid == 0


async def test_what_keeps_its_mark_ends_with_its_build_where_builds_have_no_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave = """
    def act():
        import subprocess
        command = ["/bin/sh", "-c", "sleep 1000; true", {name!r}]
        subprocess.Popen(command, start_new_session=True, stdout=-3, stderr=-3)  # both closed
    """
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # as the provider sees it
    async with world() as there:
        links, name = await offline(there), token_hex(8)
        add_source(links, "hostile", leave.format(name=name))
        there.build("a", ASK, "hostile\n")
        (endpoint,) = await there.ready(await there.deploy("a"))
        assert await call(endpoint) == b"nothing"
        assert processes_named(name) == []
