"""The policy in force, through the datastore: set by anyone, taken over by whoever leads."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from logging import Logger
from typing import NamedTuple

from scheduler import policies
from scheduler.model.errors import Fenced, SchedulerError, StoreUnavailable
from scheduler.store.datastore import Fence, Store
from scheduler.store.recovery import sound_choice
from scheduler.store.stored_records import (
    ADMINISTRATOR,
    CONFIGURATION,
    POLICY,
    BadRecord,
    PolicyChoice,
    encoded,
    policy_record,
)

_TRY_AGAIN_S = 0.5

Apply = Callable[[PolicyChoice], Awaitable[None]]


class Written(NamedTuple):
    """A choice as the datastore has it since this revision; None where that is nothing of use."""

    choice: PolicyChoice | None
    revision: int


class PolicyInForce:
    """What a leader decides by: of all choices the one that was written last.

    Whoever writes a choice and whoever hears of it both say so; the first to come applies it.
    """

    def __init__(self, begun_with: PolicyChoice, apply: Apply) -> None:
        self.choice = begun_with
        self._apply = apply
        self._revision = 0
        self._writing = asyncio.Lock()  # what is in force is written over no choice made meanwhile

    async def choose(self, store: Store, name: str, parameters: Mapping[str, float]) -> None:
        """Choose the policy of all schedulers, and decide by it; raises as `set_policy`."""
        async with self._writing:
            written = await set_policy(store, name, parameters)
            # It is the latest: what seemed to be later was lost with the datastore's data.
            self._revision = min(self._revision, written.revision - 1)
            await self.take(written)

    async def heard(
        self, store: Store, written: Written, fence: Callable[[], Fence | None], log: Logger
    ) -> None:
        """Take over what the datastore has, or store what is in force where that goes before."""
        async with self._writing:
            if written.revision < self._revision:
                if (await store.list(POLICY)).revision >= self._revision:
                    return  # it comes late
                self._revision = 0  # the datastore has lost its data, and counts anew
            chosen, current = written.choice, self.choice
            if chosen is None or (_is_ours(current) and _is_ours(chosen)):
                await _keep(store, current, chosen, fence(), log)
                return
            try:
                await self.take(written)
            except SchedulerError as error:
                log.warning("the policy that was chosen is not applied: %s", error)

    async def take(self, written: Written) -> None:
        """Decide by it, unless a later one was taken; raises what `apply` raises."""
        if written.revision <= self._revision:
            return
        self._revision = written.revision
        if written.choice is not None and written.choice != self.choice:
            await self._apply(written.choice)
            self.choice = written.choice


async def set_policy(store: Store, name: str, parameters: Mapping[str, float]) -> Written:
    """Choose the policy of all schedulers; raises where there is no such policy or parameter."""
    policies.make(name, parameters)
    choice = PolicyChoice(name, dict(parameters), ADMINISTRATOR)
    return Written(choice, await store.put(POLICY, encoded(policy_record(choice))))


async def follow_policy(
    store: Store, in_force: PolicyInForce, fence: Callable[[], Fence | None], log: Logger
) -> None:
    """As long as this scheduler leads: apply what is chosen, and keep what is in force stored."""
    while True:
        try:
            async with aclosing(_choices(store, log)) as found:
                async for written in found:
                    await in_force.heard(store, written, fence, log)
        except StoreUnavailable as error:
            log.debug("the policy is not stored: %s", error)
            await asyncio.sleep(_TRY_AGAIN_S)


async def _choices(store: Store, log: Logger) -> AsyncGenerator[Written, None]:
    """What is stored, and every change of it."""
    async with aclosing(store.watch(POLICY)) as found:
        async for changes in found:
            if changes.complete or POLICY in changes.values:
                yield Written(_chosen(changes.values.get(POLICY), log), changes.revision)


def _is_ours(choice: PolicyChoice) -> bool:
    """Whether it was configured, so that the leader's own configuration goes before it."""
    return choice.chosen_by == CONFIGURATION


def _chosen(value: bytes | None, log: Logger) -> PolicyChoice | None:
    if value is None:
        return None
    try:
        return sound_choice(value)
    except (BadRecord, SchedulerError) as error:
        log.warning("the stored policy is replaced: %s", error)
        return None


async def _keep(
    store: Store,
    choice: PolicyChoice,
    stored: PolicyChoice | None,
    fence: Fence | None,
    log: Logger,
) -> None:
    """Let everybody see what is in force; a leader that is one no more leaves it."""
    if choice == stored:
        return
    try:
        await store.write({POLICY: encoded(policy_record(choice))}, fence=fence)
    except Fenced as error:
        log.debug("the policy is not stored: %s", error)
