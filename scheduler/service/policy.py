"""The policy in force, through the datastore: set by anyone, taken over by whoever leads."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from logging import Logger

from scheduler import policies
from scheduler.errors import Fenced, SchedulerError, StoreUnavailable
from scheduler.ports import Fence, Store
from scheduler.service.records import (
    ADMINISTRATOR,
    CONFIGURATION,
    POLICY,
    BadRecord,
    PolicyChoice,
    encoded,
    policy_record,
)
from scheduler.service.recovery import sound_choice

_TRY_AGAIN_S = 0.5

Apply = Callable[[PolicyChoice], Awaitable[None]]


async def set_policy(store: Store, name: str, parameters: Mapping[str, float]) -> PolicyChoice:
    """Choose the policy of all schedulers; raises where there is no such policy or parameter."""
    policies.make(name, parameters)
    choice = PolicyChoice(name, dict(parameters), ADMINISTRATOR)
    await store.put(POLICY, encoded(policy_record(choice)))
    return choice


async def follow_policy(
    store: Store,
    begun_with: PolicyChoice,
    apply: Apply,
    fence: Callable[[], Fence | None],
    log: Logger,
) -> None:
    """As long as this scheduler leads: apply what is chosen, and keep what is in force stored."""
    current = begun_with
    while True:
        try:
            async with aclosing(_choices(store, log)) as found:
                async for chosen in found:
                    if chosen is None or (_is_ours(current) and _is_ours(chosen)):
                        await _keep(store, current, chosen, fence(), log)
                    elif chosen != current and await _applied(apply, chosen, log):
                        current = chosen
        except StoreUnavailable as error:
            log.debug("the policy is not stored: %s", error)
            await asyncio.sleep(_TRY_AGAIN_S)


async def _choices(store: Store, log: Logger) -> AsyncGenerator[PolicyChoice | None, None]:
    """What is stored, and every change of it; None where that is nothing of use."""
    async with aclosing(store.watch(POLICY)) as found:
        async for changes in found:
            if changes.complete or POLICY in changes.values:
                yield _chosen(changes.values.get(POLICY), log)


async def _applied(apply: Apply, chosen: PolicyChoice, log: Logger) -> bool:
    try:
        await apply(chosen)
    except SchedulerError as error:
        log.warning("policy %s is not applied: %s", chosen.name, error)
        return False
    return True


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
