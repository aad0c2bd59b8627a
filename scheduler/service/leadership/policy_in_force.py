"""The policy in force, kept in the datastore: set on any scheduler, applied by the leader."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from logging import Logger
from typing import NamedTuple

from scheduler import policies
from scheduler.model.errors import Fenced, SchedulerError, StoreUnavailable
from scheduler.store.datastore import Fence, Store
from scheduler.store.recovery import sound_choice
from scheduler.store.stored_records import ADMINISTRATOR, CONFIGURATION, POLICY, PolicyChoice
from scheduler.wire.codec import encoded

_TRY_AGAIN_S = 0.5

Apply = Callable[[PolicyChoice], Awaitable[None]]


class Written(NamedTuple):
    """The datastore's choice since this revision; None if it holds no usable choice."""

    choice: PolicyChoice | None
    revision: int


class PolicyInForce:
    """The policy that a leader decides by: of all choices the one that was written last.

    A new choice arrives from its writer and from the datastore's watch; the first arrival applies
    it. `fence` is None without a leadership.
    """

    def __init__(
        self,
        begun_with: PolicyChoice,
        apply: Apply,
        store: Store,
        fence: Callable[[], Fence | None],
        log: Logger,
    ) -> None:
        self.choice = begun_with
        self._apply = apply
        self._store = store
        self._fence = fence
        self._log = log
        self._revision = 0
        self._writing = asyncio.Lock()  # so that the stored policy never replaces a newer choice

    async def choose(self, name: str, parameters: Mapping[str, float]) -> None:
        """Choose the policy of all schedulers, and decide by it; raises as `set_policy`."""
        async with self._writing:
            written = await set_policy(self._store, name, parameters)
            # This choice is the latest: any higher revision was lost with the datastore's data.
            self._revision = min(self._revision, written.revision - 1)
            await self.take(written)

    async def follow(self) -> None:
        """While this scheduler leads: apply stored choices, and keep the policy in force stored."""
        while True:
            try:
                async with aclosing(_choices(self._store, self._log)) as choices:
                    async for written in choices:
                        await self.reconcile(written)
            except StoreUnavailable as error:
                self._log.debug("the policy is not stored: %s", error)
                await asyncio.sleep(_TRY_AGAIN_S)

    async def reconcile(self, written: Written) -> None:
        """Apply the datastore's choice, or store the policy in force if that takes precedence."""
        async with self._writing:
            if written.revision < self._revision:
                if (await self._store.list(POLICY)).revision >= self._revision:
                    return  # a newer choice is in force
                self._revision = 0  # the datastore has lost its data; its revisions start again
            chosen = written.choice
            if chosen is None or (_is_ours(self.choice) and _is_ours(chosen)):
                if self.choice != chosen:
                    await self._keep()
                return
            try:
                await self.take(written)
            except SchedulerError as error:
                self._log.warning("the stored policy cannot be applied: %s", error)

    async def take(self, written: Written) -> None:
        """Apply this choice unless a later one was applied; raises what `apply` raises."""
        if written.revision <= self._revision:
            return
        self._revision = written.revision
        if written.choice is not None and written.choice != self.choice:
            await self._apply(written.choice)
            self.choice = written.choice

    async def _keep(self) -> None:
        try:
            await self._store.write({POLICY: encoded(self.choice)}, fence=self._fence())
        except Fenced as error:
            self._log.debug("the policy is not stored: %s", error)


async def set_policy(store: Store, name: str, parameters: Mapping[str, float]) -> Written:
    """Choose the policy of all schedulers; raises where there is no such policy or parameter."""
    policies.make(name, parameters)
    choice = PolicyChoice(name, dict(parameters), ADMINISTRATOR)
    try:
        return Written(choice, await store.put(POLICY, encoded(choice)))
    except StoreUnavailable as error:
        why = f"{error}; once etcd answers, the policy may be in force nevertheless"
        raise StoreUnavailable(why) from error


async def _choices(store: Store, log: Logger) -> AsyncGenerator[Written, None]:
    async with aclosing(store.watch(POLICY)) as watch:
        async for changes in watch:
            if changes.complete or POLICY in changes.values:
                yield Written(_chosen(changes.values.get(POLICY), log), changes.revision)


def _is_ours(choice: PolicyChoice) -> bool:
    """Whether the choice is from a configuration file: the leader's own file takes precedence."""
    return choice.chosen_by == CONFIGURATION


def _chosen(value: bytes | None, log: Logger) -> PolicyChoice | None:
    if value is None:
        return None
    try:
        return sound_choice(value)
    except SchedulerError as error:
        log.warning("the stored policy is replaced: %s", error)
        return None
