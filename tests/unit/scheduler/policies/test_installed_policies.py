"""Policies that other distributions bring: found by their entry points, or refused clearly."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from scheduler import policies
from scheduler.model.errors import AmbiguousPolicy, UnknownPolicy
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, placements

NEWEST = '''"""NEWEST: the least used idle GPU takes the last request of the first one's models."""

from dataclasses import dataclass
from typing import Annotated

from scheduler.policies.placement_policy import Place


@dataclass(frozen=True, slots=True)
class Policy:
    """Last in, first out."""

    pace: Annotated[int, "nothing"] = 1

    def decide(self, view):
        for slot in view.idle_slots():
            head = view.head(slot)
            if head is not None:
                yield Place((view.last_like(head),), slot, "newest")
'''
# Its name, its entry points, and the source of its module.
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with these entry points; its module is `policies_of_<name>`."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def installed(name: str, entry_points: str, source: str) -> None:
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        text = f"[{policies.GROUP}]\n{entry_points}\n"
        (metadata / "entry_points.txt").write_text(text)
        (tmp_path / f"policies_of_{name}.py").write_text(source)
        policies.modules.cache_clear()

    yield installed
    policies.modules.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("policies_of_"):
            del sys.modules[name]


def test_core_places_by_a_policy_when_a_distribution_brings_it(install: Install) -> None:
    install("theirs", "newest = policies_of_theirs", NEWEST)

    assert "newest" in policies.available()
    world = World(a_core("newest"))
    world.arrive(request("r0"), request("r1"), request("r2"))
    assert placements(world.free("g0")) == [("r2", "g0")]


def test_description_is_that_of_the_module_when_a_distribution_brings_it(install: Install) -> None:
    install("theirs", "newest = policies_of_theirs", NEWEST)

    described = policies.describe("newest")
    assert described.summary.startswith("NEWEST: ")
    assert described.rule == "Last in, first out."
    assert described.parameters == {"pace": 1}
    assert described.meanings == {"pace": "nothing"}


@pytest.mark.parametrize(
    ("entry", "source", "reason"),
    [
        ("policies_of_theirs", "class Policy: pass\n", "its `Policy` is no dataclass"),
        ("policies_of_theirs", "", "its `Policy` is no dataclass"),
        ("policies_of_theirs", "import nothing_of_this_name\n", "'policies_of_theirs' cannot be"),
        ("policies_of_theirs", "class\n", "'policies_of_theirs' cannot be"),
        ("policies_of_nobody", "", "its module 'policies_of_nobody' cannot be imported"),
    ],
)
def test_policy_is_refused_by_name_when_what_is_installed_is_none(
    install: Install, entry: str, source: str, reason: str
) -> None:
    install("theirs", f"newest = {entry}", source)

    for use in (policies.make, policies.describe):
        with pytest.raises(UnknownPolicy, match=rf"^policy 'newest': .*{reason}"):
            use("newest")
    assert policies.make("lalbo3") == policies.make("lalbo3", {})


def test_name_is_refused_when_one_of_ours_has_it(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("theirs", "lalbo3 = policies_of_theirs", NEWEST)

    assert main(["simulate", "--policy", "rr"]) == EXIT_BAD_USE

    said = capsys.readouterr().err
    assert "policy 'lalbo3' is given twice, by gpufaas itself and by the distribution" in said
    assert "theirs (policies_of_theirs): uninstall one of them" in said


def test_name_is_refused_when_two_distributions_have_it(install: Install) -> None:
    install("one", "newest = policies_of_one", NEWEST)
    install("two", "newest = policies_of_two", NEWEST)

    with pytest.raises(AmbiguousPolicy, match=r"'newest' .*\b(one|two)\b .*\b(one|two)\b "):
        policies.available()


def test_folder_and_entry_points_are_read_once_when_asked_often(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    read: list[str] = []

    def entry_points(*, group: str) -> tuple[()]:
        read.append(group)
        return ()

    request.addfinalizer(policies.modules.cache_clear)
    monkeypatch.setattr(policies, "entry_points", entry_points)
    policies.modules.cache_clear()
    for _ in range(3):
        assert policies.make("lb") == policies.make("lb")
        assert "lb" in policies.available()
    assert read == ["gpufaas.policies"]
