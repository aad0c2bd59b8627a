"""Users of functions and builds: one gateway's at a time, and empty when they are given back."""

import json
import os
import pwd
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway_ext.errors import ProviderFailed
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.users import UserIds, kill_all_of
from tests.kit.processes.process_functions import call, world
from tests.kit.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users' processes")

FIRST = 45_000  # a range of this module alone
# It calls itself another gateway's, so that nobody would end it by its mark.
HIDE = """
import subprocess
def handle(event, context):
    environment = {"GPUFAAS_INSTANCE": "another/instance"}
    command = ["/bin/sleep", "1000"]
    return str(subprocess.Popen(command, start_new_session=True, env=environment).pid)
"""


def test_id_is_given_to_one_gateway_at_a_time(tmp_path: Path) -> None:
    one, other = (UserIds(tmp_path / "locks", FIRST, 3) for _ in range(2))
    taken = {one.take(), other.take(), one.take()}
    assert taken == {FIRST, FIRST + 1, FIRST + 2}
    with pytest.raises(ProviderFailed, match="all user ids from 45000 to 45002 are in use"):
        other.take()
    (held,) = other.held
    assert not one.keep(held)
    other.close()
    assert one.keep(held)
    assert not one.keep(FIRST + 3), "it is out of the range"
    one.close()


def test_id_that_was_given_back_is_given_again_only_after_the_others(tmp_path: Path) -> None:
    ids = UserIds(tmp_path / "locks", FIRST, 4)
    seen = []
    for _ in range(4):
        seen.append(ids.take())
        ids.give_back(seen[-1])
    assert sorted(seen) == list(range(FIRST, FIRST + 4))
    ids.close()


def test_threads_are_never_given_the_same_id(tmp_path: Path) -> None:
    ids = UserIds(tmp_path / "locks", FIRST + 50, 64)
    with ThreadPoolExecutor(16) as threads:
        taken = list(threads.map(lambda _: ids.take(), range(64)))
    assert len(set(taken)) == 64
    ids.close()


def test_free_id_is_found_whatever_other_threads_try_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, other = (UserIds(tmp_path / "locks", FIRST, 3) for _ in range(2))
    ids._next = 0  # noqa: SLF001 - the id that is the other gateway's comes first
    assert other.keep(FIRST)
    kept = ids.keep

    def keep_while_others_come_and_go(uid: int) -> bool:
        if uid == FIRST:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(ids, "keep", kept)
                for _ in range(2):
                    ids.give_back(ids.take())
        return kept(uid)

    monkeypatch.setattr(ids, "keep", keep_while_others_come_and_go)
    assert ids.take() in {FIRST + 1, FIRST + 2}
    for each in (ids, other):
        each.close()


def test_id_of_a_user_whom_the_machine_knows_is_never_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = pwd.getpwuid(0)
    unknown = pwd.getpwuid

    def with_a_user(uid: int) -> pwd.struct_passwd:
        return known if uid == FIRST + 15 else unknown(uid)

    monkeypatch.setattr(pwd, "getpwuid", with_a_user)
    ids = UserIds(tmp_path / "locks", FIRST + 15, 2)
    assert ids.take() == FIRST + 16
    assert not ids.keep(FIRST + 15), "not even if a record names it"
    ids.close()


def test_id_of_a_user_who_has_a_process_is_passed_over(tmp_path: Path) -> None:
    ids = UserIds(tmp_path / "locks", FIRST + 10, 2)
    with subprocess.Popen(["sleep", "1000"], user=FIRST + 10) as stranger:
        assert ids.take() == FIRST + 11
        with pytest.raises(ProviderFailed):
            ids.take()
        stranger.kill()
    ids.close()


def test_locks_are_not_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "locks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels"):
        UserIds(tmp_path / "locks", FIRST, 1)
    assert not (tmp_path / "elsewhere").exists()


def test_all_processes_of_a_user_end_and_no_others() -> None:
    with (
        subprocess.Popen(["sleep", "1000"], user=FIRST + 21, start_new_session=True) as mine,
        subprocess.Popen(["sleep", "1000"], user=FIRST + 22) as anothers,
    ):
        kill_all_of([FIRST + 21], FIRST + 20)
        assert mine.wait(10) == -9
        assert anothers.poll() is None
        anothers.kill()


async def test_user_is_ended_when_each_process_forks_the_next_one_and_exits() -> None:
    chase = """
        while true; do
            (exec sh -c "$0" "$0" &)
            exit
        done
    """
    uid = FIRST + 31
    command = ["sh", "-c", textwrap.dedent(chase), textwrap.dedent(chase)]
    subprocess.run(command, user=uid, check=True, stdin=subprocess.DEVNULL)
    kill_all_of([uid], FIRST + 30)
    await eventually(lambda: uid not in processes.users(), "its end")


@pytest.mark.parametrize("uid", [0, 1, 999])
def test_users_of_the_system_are_never_ended(uid: int) -> None:
    with pytest.raises(ProviderFailed, match="not users whose processes may be ended"):
        kill_all_of([uid], FIRST + 40)
    with pytest.raises(ProviderFailed, match="not users whose processes may be ended"):
        kill_all_of([FIRST + 41], uid)


async def test_what_claims_to_be_another_gateways_ends_with_its_function() -> None:
    async with world() as there:
        there.build("f", HIDE)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        hidden = int(await call(endpoint))
        uid = Path(f"/proc/{hidden}").stat().st_uid
        assert uid in processes.users()
        await there.provider.remove(f)
        await eventually(lambda: uid not in processes.users(), "its end")


async def test_what_hides_ends_with_the_gateway() -> None:
    async with world() as there:
        there.build("f", HIDE)
        (endpoint,) = await there.ready(await there.deploy())
        hidden = int(await call(endpoint))
        uid = Path(f"/proc/{hidden}").stat().st_uid
        await there.provider.close()
        assert uid not in processes.users()


async def test_function_gets_another_user_when_its_own_was_given_to_another_gateway() -> None:
    async with world() as there:
        there.build("f", "import os\ndef handle(event, context):\n    return str(os.getuid())\n")
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        before = int(await call(endpoint))
        (folder,) = (there.state / "functions").iterdir()
        outside = there.folder / "outside"
        outside.write_text("root's")
        (folder / "home" / "link").symlink_to(outside)
        await there.provider.close()
        another = UserIds(there.bounds.user_locks, before, 1)
        assert another.keep(before)
        there.heard.endpoints.clear()
        there.provider = there.new_provider()
        await there.provider.start(there.heard)
        (endpoint,) = await there.ready(f)
        assert int(await call(endpoint)) != before
        assert outside.stat().st_gid == 0
        another.close()


async def test_two_functions_never_have_one_user_whatever_their_records_say() -> None:
    async with world() as there:
        handler = "import os\ndef handle(event, context):\n    return str(os.getuid())\n"
        for name in ("f", "g"):
            there.build(name, handler)
        f, g = await there.deploy("f"), await there.deploy("g")
        (endpoint,) = await there.ready(f)
        uid = int(await call(endpoint))
        await there.provider.close()
        for path in (there.state / "functions").glob("*/record.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"uid": uid}))
        there.heard.endpoints.clear()
        there.provider = there.new_provider()
        await there.provider.start(there.heard)
        (one,), (two,) = await there.ready(f), await there.ready(g)
        assert int(await call(one)) != int(await call(two))
