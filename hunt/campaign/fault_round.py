"""One round: a world is broken, heals, serves again, and is searched for what is left.

A world goes through many rounds, so that nothing is set up for one, and all waits are for
conditions.
"""

import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from random import Random

from gpufaas.errors import CommandError
from hunt.campaign.campaign_functions import Executions
from hunt.campaign.judging.call_journal import CallJournal, Kind, WatchedCall, most_at_once
from hunt.campaign.judging.leftovers import Holdings, left_over, merged
from hunt.campaign.judging.verdict import Excuse, counts, violations
from hunt.campaign.mixed_load import EVERY_S, PATIENCE_S, MixedLoad
from hunt.campaign.round_records import RoundRecord, Seconds
from hunt.campaign.worlds.world import NOBODY, AnyWorld, Fault, World, holds_in_time
from tests.kit.waiting import StillWaiting, wait_until

NO_FAULT = "no-fault"

_BEFORE, _AFTER = 1, 2  # calls of each kind that have to succeed
_OF_BASE = 3
_SERVED_S = 120.0
_DRAINED_S = PATIENCE_S + 120.0  # an async call waits up to a minute before its next attempt
_QUIET_S = 75.0
_BASES = 3
_KEPT_S = 60.0  # twice the time for which a gateway keeps a connection that nobody uses
_AFTERMATH_S = 3.0  # what was frozen may be killed, and break connections, after it was thawed


class Violation(Exception):
    """Something does not hold that always has to; `found` says what."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("\n".join(found))
        self.found = found


class Rounds:
    """Rounds in one world, under one load; what it holds when it is quiet is known from before."""

    def __init__(self, world: World, load: MixedLoad, journal: CallJournal, commit: str) -> None:
        self._world = world
        self._load = load
        self._journal = journal
        self._commit = commit
        self._executions = Executions(world.work)
        self._base = Holdings()
        self._crowds: list[tuple[float, int]] = []  # the calls at once of each round, and its end

    def measure_base(self, seed: int) -> RoundRecord:
        """Serve, fall quiet, and look what the world holds then, several times; no fault yet."""
        record = self._record(NO_FAULT, 0, seed)
        try:
            for _ in range(_BASES):
                self._journal.forget()
                self._serve_a_burst()
                now = self._quiet_holdings()
                self._base = merged(self._base, now)
                found = left_over(self._base, now) + self._world.wrong()
                if found:
                    raise Violation(found)
        except Violation as violation:
            record.violations = violation.found
        return record

    def run(self, fault: Fault[AnyWorld], world: AnyWorld, number: int, seed: int) -> RoundRecord:
        """One round; what it found is in the record, violations too."""
        rng = Random(f"{seed}/{world.name}/{fault.name}/{number}")
        record = self._record(fault.name, number, seed)
        began_s = time.monotonic()
        self._journal.forget()
        try:
            self._break_and_heal(fault, world, rng, record)
        except Violation as violation:
            record.violations = violation.found
        record.endings = counts(self._journal.calls())
        record.callbacks = sum(len(call.callbacks) for call in self._journal.calls())
        record.took_s = round(time.monotonic() - began_s, 3)
        return record

    def _record(self, fault: str, number: int, seed: int) -> RoundRecord:
        now, load = datetime.now(tz=UTC).isoformat(timespec="seconds"), round(os.getloadavg()[0], 1)
        return RoundRecord(self._world.name, fault, number, seed, now, self._commit, load)

    def _serve_a_burst(self) -> None:
        self._load.resume()
        self._load.burst()
        self._until_served(0.0, _OF_BASE)
        self._load.pause()
        self._drain()
        excuse = Excuse(NOBODY, 0.0, 0.0)
        found = violations(self._journal.calls(), self._executions.look(), excuse)
        if found:
            raise Violation(found)

    def _break_and_heal(
        self, fault: Fault[AnyWorld], world: AnyWorld, rng: Random, record: RoundRecord
    ) -> None:
        self._load.resume()
        self._until_served(0.0, _BEFORE)
        time.sleep(rng.uniform(0.0, EVERY_S))
        fault_s = time.monotonic()
        self._break(fault, world, rng)
        healed_s = time.monotonic()
        try:
            world.restore()
        except AssertionError as error:
            raise Violation([f"not whole again: {error}"]) from error
        whole_s = time.monotonic()
        self._until_served(healed_s, _AFTER)
        self._load.pause()
        self._drain()
        calls = self._journal.calls()
        record.held_s = round(healed_s - fault_s, 3)
        record.whole_s = round(whole_s - healed_s, 3)
        record.from_fault_s = _first_served(calls, fault_s)
        record.from_heal_s = _first_served(calls, healed_s)
        record.gap_s = _longest_gap(calls, fault_s)
        excuse = Excuse(fault.breaks, fault_s, whole_s + _AFTERMATH_S)
        found = violations(calls, self._executions.look(), excuse)
        found += [f"called back for a call of nobody: {call}" for call in self._load.strangers]
        found += self._left(record)
        found += world.wrong()
        if found:
            raise Violation(found)

    def _break(self, fault: Fault[AnyWorld], world: AnyWorld, rng: Random) -> None:
        """Inflict the fault, have it last, and undo it."""
        try:
            heal = fault.inflict(world, rng)
        except (AssertionError, CommandError, OSError) as error:
            raise Violation([f"the fault cannot be inflicted: {error!r}"]) from error
        try:
            time.sleep(fault.held_s(rng))
        finally:
            heal()

    def _until_served(self, since_s: float, number: int) -> None:
        """Wait until so many calls of each kind that began after that moment were served."""

        def missing() -> list[str]:
            calls = [call for call in self._journal.calls() if call.began_s >= since_s]
            served = [call.kind for call in calls if call.served_s is not None]
            return [kind for kind in Kind if served.count(kind) < number]

        try:
            wait_until(lambda: not missing(), "each kind is served", within_s=_SERVED_S)
        except StillWaiting as error:
            self._load.pause()
            ends = counts(self._journal.calls())
            text = f"no service of {missing()} for {_SERVED_S:g} s; calls: {ends}"
            raise Violation([text]) from error

    def _drain(self) -> None:
        """Wait until every call has ended, and every accepted one was called back."""

        def under_way() -> list[WatchedCall]:
            return [call for call in self._journal.calls() if call.under_way]

        with suppress(StillWaiting):  # the verdict names those that are lost
            wait_until(lambda: not under_way(), "all calls have ended", within_s=_DRAINED_S)

    def _left(self, record: RoundRecord) -> list[str]:
        """What stays although nobody asks for anything."""
        began_s = time.monotonic()
        found: list[str] = []
        self._crowds.append((began_s, most_at_once(self._journal.calls())))

        def nothing() -> bool:
            since_s = time.monotonic() - _KEPT_S
            crowd = max((many for at_s, many in self._crowds if at_s >= since_s), default=0)
            try:
                found[:] = left_over(self._base, self._world.holdings(), calls_at_once=crowd)
            except (CommandError, OSError, ValueError) as error:
                found[:] = [f"a part does not answer: {error}"]
            record.lingered = [*found] or record.lingered
            return not found

        holds_in_time(nothing, _QUIET_S)
        record.quiet_s = round(time.monotonic() - began_s, 3)
        return found

    def _quiet_holdings(self) -> Holdings:
        """What the world holds once nothing is leased and nothing waits."""
        found: list[Holdings] = []

        def quiet() -> bool:
            found[:] = [self._world.holdings()]
            it = found[0]
            return not (it.leases or it.waiting or it.node_leases or it.zombies)

        if not holds_in_time(quiet, _QUIET_S):
            raise Violation([f"never quiet, although nothing was broken: {found}"])
        return found[0]


def _served_s(calls: list[WatchedCall], kind: Kind, since_s: float) -> list[float]:
    """When calls of this kind that began after that moment were served, in order."""
    of_kind = (call for call in calls if call.kind is kind and call.began_s >= since_s)
    return sorted(call.served_s for call in of_kind if call.served_s is not None)


def _first_served(calls: list[WatchedCall], since_s: float) -> Seconds:
    every = {kind: _served_s(calls, kind, since_s) for kind in Kind}
    return {kind: round(at_s[0] - since_s, 3) if at_s else None for kind, at_s in every.items()}


def _longest_gap(calls: list[WatchedCall], since_s: float) -> Seconds:
    """The longest time without an answer, from that moment until the last one."""
    every = {kind: [since_s, *_served_s(calls, kind, since_s)] for kind in Kind}
    return {
        kind: max((round(later - one, 3) for one, later in pairwise(at_s)), default=None)
        for kind, at_s in every.items()
    }
