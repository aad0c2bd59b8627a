"""What `gpufaas quota` sets at a scheduler that leads, and what it prints."""

import asyncio
import json
import re
from typing import Any

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.quota import quota_table
from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import SchedulerApi
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.owner_terms import OwnerTerms
from scheduler.service.access import ApiRole, token
from tests.kit.worlds.service_world import SECRET, World, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFAAS_TOKEN", token(SECRET, ApiRole.ADMIN))


async def quota(world: World, *words: str) -> int:
    return await asyncio.to_thread(main, ["quota", *words, "--scheduler", world.url])


def in_force(world: World) -> dict[str, OwnerTerms]:
    assert world.office is not None
    return dict(world.office.core.layer(Tenancy).owners.terms)


async def test_terms_that_are_not_named_stay_as_they_are() -> None:
    async with leading() as world:
        words = ("--weight", "2", "--gpu-seconds", "30", "--window", "10", "--memory", "2GiB")
        assert await quota(world, "set", "team", *words) == 0
        assert await quota(world, "set", "team", "--leases", "4", "--waiting", "9") == 0
        assert in_force(world) == {"team": OwnerTerms(2.0, 0, 30.0, 10.0, 2 * GIB, 4, 9)}
        none = ("--gpu-seconds", "none", "--memory", "none", "--leases", "none")
        assert await quota(world, "set", "team", *none, "--priority", "-2") == 0
        assert in_force(world) == {"team": OwnerTerms(2.0, -2, None, 10.0, waiting=9)}


async def test_terms_are_shown_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    async with leading() as world:
        await quota(world, "set", "team/f", "--waiting", "3")
        capsys.readouterr()
        assert await quota(world, "list", "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["owner"], row["terms"]["waiting"]) == ("team/f", 3)
        assert await quota(world, "get", "team") == 0
        assert re.search(r"^team +- +1 +0 ", capsys.readouterr().out, re.MULTILINE)
        assert await quota(world, "remove", "team/f") == 0
        assert in_force(world) == {}
        assert await quota(world, "remove", "team/f") == EXIT_BAD_USE
        assert "no terms that an operator set of" in capsys.readouterr().err


async def test_namespace_that_only_a_function_has_is_noted_and_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bill knows which functions there are."""
    async with leading() as world:
        await world.acquire("r1")
        await quota(world, "set", "team", "--gpu-seconds", "5")
        assert capsys.readouterr().err == ""
        assert await quota(world, "set", "reader", "--gpu-seconds", "5") == 0
        note = "'reader' is a namespace of no function; the function is team/reader"
        assert note in capsys.readouterr().err
        assert "reader" in in_force(world)


async def test_quota_is_set_without_the_note_when_the_models_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_to_get = SchedulerApi.get

    def get(api: SchedulerApi, path: str, **query: object) -> Any:
        if path == "/models":
            raise CommandError("it answers 500")
        return answer_to_get(api, path, **query)

    monkeypatch.setattr(SchedulerApi, "get", get)
    async with leading() as world:
        await world.acquire("r1")
        assert await quota(world, "set", "reader", "--gpu-seconds", "5") == 0
        assert capsys.readouterr().err == ""
        assert "reader" in in_force(world)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("set", "team"), "nothing to set"),
        (("set", "team", "--weight", "0"), "--weight: from 0.001 to"),
        (("set", "team", "--gpu-seconds", "-3"), "--gpu-seconds: from 0.001 to 1e+09 is expected"),
        (("set", "a/b/c", "--weight", "2"), "NAMESPACE/FUNCTION"),
        (("get", "a/b/c"), "NAMESPACE/FUNCTION"),
    ],
)
async def test_wrong_words_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with leading() as world:
        assert await quota(world, *words) == EXIT_BAD_USE
        assert said in capsys.readouterr().err
        assert in_force(world) == {}


@pytest.mark.parametrize(
    ("option", "value"), [("--weight", "much"), ("--leases", "1.5"), ("--memory", "2 bananas")]
)
def test_values_that_cannot_be_read_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quota", "set", "team", option, value])
    assert ended.value.code == EXIT_BAD_USE
    assert option in capsys.readouterr().err


def test_use_is_shown_beside_each_limit() -> None:
    terms: dict[str, Any] = {
        "weight": 2.5, "priority": 0, "gpu_s": 30.0, "window_s": 60.0,
        "resident_bytes": 2 * GIB, "leases": None, "waiting": 9,
    }  # fmt: skip
    use = {
        "gpu_s": 12.34567, "resident_bytes": GIB, "leases": 2, "waiting": 5, "held_back": 4,
        "refused": {"leases": 2, "waiting": 5},
    }  # fmt: skip
    row = {"owner": "team", "set_by": "operator", "terms": terms, "use": use}
    line = quota_table([row]).splitlines()[1]
    assert re.split(r"  +", line) == [
        "team", "operator", "2.5", "0", "12.35 s of 30 s in 60 s", "1 GiB of 2 GiB", "2", "5 of 9",
        "4", "7",
    ]  # fmt: skip
