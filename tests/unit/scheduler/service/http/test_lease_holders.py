"""Who holds which lease is noted at a cost that does not grow with what is noted already."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.model.values import LeaseId, RequestId
from scheduler.service.streams import callers
from scheduler.service.streams.callers import CallerLeases
from tests.kit.waiting import eventually

_PARTS = 64


class CountingLeases(dict[LeaseId, Any]):
    """The leases in force, and how often somebody has looked whether one is."""

    looks = 0

    def __contains__(self, lease: object) -> bool:
        self.looks += 1
        return super().__contains__(lease)


def _office(leases: range) -> Any:
    """An office with these leases in force, each of several requests that it does not know yet."""
    shared = {LeaseId(lease): SimpleNamespace(is_shared=True) for lease in leases}
    core = SimpleNamespace(leases=CountingLeases(shared), requests={})
    return SimpleNamespace(core=core, closed=False, driver=SimpleNamespace(release=_ignore))


def _ignore(*_: object) -> None:
    pass


def _parts(leases: range) -> Iterator[tuple[LeaseId, RequestId]]:
    for lease in leases:
        yield from ((LeaseId(lease), RequestId(f"{lease}/{part}")) for part in range(_PARTS))


def test_new_leader_hears_of_thousands_of_parts_whose_requests_nobody_has_asked_for_yet() -> None:
    office, holders = _office(range(100)), CallerLeases()
    for lease, request in _parts(range(100)):
        holders.granted(office, "one", lease, request)
    assert office.core.leases.looks < 3 * 100 * _PARTS


async def test_holders_of_leases_that_ended_without_a_release_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "RETURN_S", 0.0)
    holders, remembered = CallerLeases(), 2 * 10 * _PARTS + 1_001
    for first in range(0, 1_000, 10):
        leases = range(first, first + 10)
        office = _office(leases)
        for lease, request in _parts(leases):
            holders.granted(office, "one", lease, request)
    office = _office(range(0))
    with holders.present(office, "one"):
        pass
    await eventually(lambda: office.core.leases.looks > 0, "what the caller had has ended")
    assert office.core.leases.looks <= remembered
