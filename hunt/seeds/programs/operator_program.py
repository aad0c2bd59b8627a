"""The operator of a simulated cluster: changes policies, terms and workflows while it runs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import NoResponse
from common.time_limits import time_limit
from hunt.seeds.programs.callers import HOST, CallersProgram
from hunt.seeds.programs.gateway_program import workflow_text
from hunt.seeds.programs.scheduler_program import SchedulerProgram
from hunt.seeds.scenarios.planned_functions import OperatorChange
from hunt.seeds.surroundings import Surroundings
from scheduler.features.tenants.quotas import Quotas
from scheduler.model.errors import SchedulerError
from scheduler.model.owner_terms import OwnerTerms
from scheduler.service.scheduler_service import SchedulerService
from tests.kit.simulation.simulated_loop import SimulatedProgram

_PATIENCE_S = 5.0
_AGAIN_S = 0.5
_ACCEPTED = 202

# What is changed beside the terms of owners, which have names of their own.
POLICY, WORKFLOW_TEXT = "policy", "workflow"


class OperatorProgram:
    """On the host of the callers, which nothing befalls; makes one change after the other."""

    def __init__(
        self,
        around: Surroundings,
        callers: CallersProgram,
        schedulers: list[SchedulerProgram],
        life_of: Callable[[str], SimulatedProgram | None],
    ) -> None:
        # What may hold in the end, by what is changed: what was accepted last, and all that nobody
        # answered, which may have been done, or may be done later.
        self.accepted: dict[str, object] = {}
        self.unknown: dict[str, list[object]] = {}
        self._around = around
        self._callers = callers
        self._schedulers = schedulers
        self._life_of = life_of

    async def run(self) -> None:
        """Make the changes of the scenario, each at its time."""
        scenario, loop = self._around.scenario, self._around.loop
        if scenario.workflow and scenario.shared_queue:
            await self._deploy(0, update=False)
        for change in scenario.changes:
            await asyncio.sleep(max(0.0, change.at_s - loop.passed_s))
            await self._make(change)

    def may_hold(self, what: str, found: object) -> bool:
        """Whether this may be in force once all is at rest."""
        if what not in self.accepted and what not in self.unknown:
            return True
        unknown = self.unknown.get(what, [])
        return found in unknown or found == self.accepted.get(what, found)

    async def _make(self, change: OperatorChange) -> None:
        if change.version:
            await self._deploy(change.version, update=True)
        elif change.policy:
            await self._set(POLICY, change.policy, _policy_set(change.policy))
        else:
            await self._set(change.owner, change.terms, _terms_set(change.owner, change.terms))

    async def _set(self, what: str, value: object, work: "_Change") -> None:
        """Have a scheduler that leads set this, once: what it does not answer is unknown."""
        leading = [each for each in self._schedulers if each.office is not None]
        if not leading:
            return
        scheduler = self._around.chance.choice(leading)
        service, life = scheduler.service, self._life_of(scheduler.name)
        assert service is not None
        assert life is not None, "it leads"
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            async with time_limit(_PATIENCE_S):
                await self._around.network.travel(HOST, scheduler.name)
                if life.alive:
                    life.start(_answering(work(service), answer), "an operator's change")
                error = await answer
                await self._around.network.travel(scheduler.name, HOST)
        except TimeoutError:
            error = "nobody answered"
        self._note(what, value, error)

    async def _deploy(self, version: int, *, update: bool) -> None:
        """Have a gateway deploy the workflow that all of them share, until one has."""
        text = workflow_text(self._around.scenario.functions, version)
        chance, scenario = self._around.chance, self._around.scenario
        while True:
            gateway = f"g{chance.randrange(scenario.gateways)}"
            method = "PUT" if update else "POST"
            try:
                async with time_limit(_PATIENCE_S):
                    status, body = await self._callers.ask(
                        gateway, method, "system/workflows", (), text
                    )
            except (NoResponse, TimeoutError) as failure:
                status, body = 0, str(failure) or "no answer"
            accepted = status == _ACCEPTED
            self._note(WORKFLOW_TEXT, text, "" if accepted else f"{status} {body[:80]}")
            if accepted:
                return
            await asyncio.sleep(_AGAIN_S)

    def _note(self, what: str, value: object, error: str) -> None:
        self._around.journal.note(f"operator: {what} {str(value)[:80]!r}: {error or 'accepted'}")
        if error:
            self.unknown.setdefault(what, []).append(value)
        else:
            self.accepted[what] = value


_Change = Callable[[SchedulerService], Coroutine[Any, Any, None]]


def _policy_set(policy: str) -> _Change:
    return lambda service: service.set_policy(policy, {})


def _terms_set(owner: str, terms: OwnerTerms | None) -> _Change:
    return lambda service: service.feature(Quotas).set(owner, terms)


async def _answering(work: Coroutine[Any, Any, None], answer: asyncio.Future[str]) -> None:
    try:
        await work
    except SchedulerError as error:
        found = f"{type(error).__name__} {error}"
    else:
        found = ""
    if not answer.done():
        answer.set_result(found)
