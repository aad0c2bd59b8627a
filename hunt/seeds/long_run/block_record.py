"""What a block of seeds came to: run in one process, kept as one line of JSON."""

import gc
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from hunt.seeds.scenarios.scenario import Scenario, scenario_of
from hunt.seeds.simulation import SeedOutcome, run_seed

# The two kinds of scenarios that times to service are kept for.
PLAIN, OVERLOADED = "not overloaded", "overloaded"
# A seed takes a tenth of a second: one that takes so long of the processor's time never ends.
_LONGEST_S = 120.0
_SHOWN_VIOLATIONS = 5
_DIGITS = 2


@dataclass(frozen=True, slots=True)
class FailedSeed:
    """A seed that failed, and what was wrong."""

    seed: int
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackAgain:
    """How long after the last fault a seed's cluster served again, and who came last."""

    seed: int
    seconds: float
    last: str


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """The seeds from `first` on, at one commit; `drawn` counts faults, policies and the rest."""

    commit: str
    first: int
    count: int
    took_s: float
    calls: int
    answered: int
    events: int
    virtual_s: float
    drawn: Mapping[str, int]
    back: Mapping[str, Sequence[BackAgain]]
    failed: Sequence[FailedSeed]

    @property
    def seeds(self) -> range:
        """Those of this block."""
        return range(self.first, self.first + self.count)

    def as_line(self) -> str:
        """For a file of such records."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_line(line: str) -> BlockRecord:
    """The record of a line."""
    fields: dict[str, Any] = json.loads(line)
    fields["failed"] = [
        FailedSeed(each["seed"], tuple(each["violations"])) for each in fields["failed"]
    ]
    fields["back"] = {
        kind: [BackAgain(**each) for each in found] for kind, found in fields["back"].items()
    }
    return BlockRecord(**fields)


def run_block(commit: str, seeds: range) -> BlockRecord:
    """Run these seeds, one after the other."""
    gc.collect()  # what the last seeds of a process left; each of them had frozen it for the next
    began_s = time.process_time()
    drawn: Counter[str] = Counter()
    back: dict[str, list[BackAgain]] = {PLAIN: [], OVERLOADED: []}
    outcomes = []
    for seed in seeds:
        scenario, outcome = scenario_of(seed), _outcome(seed)
        drawn.update(_drawn(scenario))
        if not outcome.violations:
            kind = OVERLOADED if scenario.overloaded else PLAIN
            back[kind].append(BackAgain(seed, round(outcome.back_s, _DIGITS), outcome.last_back))
        outcomes.append(outcome)
    return BlockRecord(
        commit=commit,
        first=seeds.start,
        count=len(seeds),
        took_s=round(time.process_time() - began_s, _DIGITS),
        calls=sum(each.calls for each in outcomes),
        answered=sum(each.answered for each in outcomes),
        events=sum(each.events for each in outcomes),
        virtual_s=round(sum(each.virtual_s for each in outcomes), _DIGITS),
        drawn=dict(sorted(drawn.items())),
        back=back,
        failed=[
            FailedSeed(each.seed, each.violations[:_SHOWN_VIOLATIONS])
            for each in outcomes
            if each.violations
        ],
    )


def without_result(commit: str, seeds: range, why: str) -> BlockRecord:
    """The record of a block whose process never said what came of it."""
    failed = [FailedSeed(seed, (why,)) for seed in seeds]
    nothing: dict[str, Sequence[BackAgain]] = {PLAIN: [], OVERLOADED: []}
    return BlockRecord(commit, seeds.start, len(seeds), 0.0, 0, 0, 0, 0.0, {}, nothing, failed)


def _drawn(scenario: Scenario) -> Iterator[str]:
    """What chance has made of this scenario, for people who want to know what was covered."""
    yield f"policy {scenario.policy}"
    yield f"queue {'shared' if scenario.shared_queue else 'of each gateway'}"
    yield f"GPUs {scenario.shape}"
    yield "overloaded" if scenario.overloaded else "not overloaded"
    if any(each.batch for each in scenario.functions):
        yield "with list handlers"
    if len({each.tenant for each in scenario.functions}) > 1:
        yield "with two name spaces"
    if scenario.workflow:
        yield "with a workflow"
    if scenario.leaving_share:
        yield "with clients that leave"
    for fault in scenario.faults:
        target = "a link" if fault.other else fault.target.rstrip("0123456789")
        yield f"fault {target} {fault.kind}"
    for change in scenario.changes:
        yield f"change {'policy' if change.policy else 'terms' if change.owner else 'workflow'}"


class _TooLong(KeyboardInterrupt):
    """The time of a seed is up; nothing but KeyboardInterrupt leaves an event loop at once."""


def _outcome(seed: int) -> SeedOutcome:
    try:
        with _bounded():
            return run_seed(seed)
    except _TooLong:
        wrong = f"it took more than {_LONGEST_S:g} s of the processor's time"
        return SeedOutcome.without(seed, wrong)


@contextmanager
def _bounded() -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, _end)
    signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _end(*_: object) -> None:
    raise _TooLong
