"""One soak: the examples under a mixed load, with changes at random, sampled all the while."""

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.gateway.bench_stacks import call_until_leased, stack_of_builds
from bench.measure.process_usage import parts_in_tree
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import WholeStack
from gateway_ext.runtime.template.example_calls import examples_in
from gpufaas.errors import CommandError
from hunt.soak.attribution.heap_report import heap_section
from hunt.soak.attribution.watched_parts import WatchPlan, end_watch, watching
from hunt.soak.mixed_load import MixedLoad
from hunt.soak.random_changes import ChangeCounts, RandomChanges
from hunt.soak.soak_sampler import Series, SoakSampler
from hunt.soak.table_samples import addresses_of, sample_tables

_ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = ("--devices", "cpu:2", "--gpu-memory", "2GiB", "--store-memory", "1GiB")
_REMEMBERED = ("GPUFAAS_TRACING_KEEP", "GPUFAAS_SCHEDULER_HISTORY")
_PROCESS = "python runtime --gpu"
_WARMED = ("classify", "generate", "pipeline")
_ACCEPTED = 202
_REST_S, _ASK_S = 90.0, 0.5
# What must be empty once nothing is called any more.
_EMPTY = (
    ("scheduler", "leases"),
    ("scheduler", "waiting requests"),
    ("scheduler", "owners with terms"),
    ("gateway", "calls in flight"),
    ("gateway", "calls waiting"),
    ("gateway", "functions"),
    ("gateway", "jobs queued"),
    ("gateway", "workflows running"),
    ("gpu-manager", "leases"),
    ("gpu-manager", "sessions"),
    ("gpu-manager", "pieces of data"),
)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """How long, how many calls a second, by which seed, and how often everything is looked at.

    Parts that are watched say themselves what their memory consists of. With `remember` gateway
    and scheduler remember so many calls: as it comes they are full after an hour of few calls.
    """

    seconds: float
    rate: float
    seed: int
    every_s: float
    watch: WatchPlan = field(default_factory=WatchPlan)
    remember: int | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """What the stack's environment says of that."""
        return {} if self.remember is None else dict.fromkeys(_REMEMBERED, str(self.remember))


@dataclass(frozen=True, slots=True)
class SoakOutcome:
    """What was sampled, answered and changed, and what is left although nobody needs it.

    `heaps` has a section of Markdown for each watched process.
    """

    series: Series
    missed: list[str]
    statuses: Mapping[str, Mapping[str, int]]
    unexpected: Mapping[str, int]
    changes: ChangeCounts
    left: list[str]
    heaps: Sequence[str]


def soak(plan: SoakPlan) -> SoakOutcome:
    """Run the examples and everything that happens to them, then remove all of it."""
    with tempfile.TemporaryDirectory(prefix="heaps") as name:
        return _soak(plan, Path(name))


def _soak(plan: SoakPlan, heaps: Path) -> SoakOutcome:
    variables = {**plan.variables, **watching(plan.watch, heaps)}
    with stack_of_builds(*_OPTIONS, variables=variables) as running:
        examples = deploy_examples(running)
        changes = RandomChanges(running, plan.seed)
        load = MixedLoad(running.url, examples, plan.rate, plan.seconds, plan.seed)
        with ExitStack() as meanwhile:
            sampler = meanwhile.enter_context(SoakSampler(running, plan.every_s))
            meanwhile.enter_context(changes)
            meanwhile.enter_context(load)
        changes.undo()
        _remove_examples(running)
        left = _left(running)
        sections = [heap_section(file) for file in end_watch(heaps)]
    return SoakOutcome(
        series=dict(sampler.series),
        missed=sampler.missed,
        statuses=load.statuses(),
        unexpected=load.unexpected(),
        changes=changes.counts(),
        left=left,
        heaps=sections,
    )


def deploy_examples(running: WholeStack) -> Path:
    """The functions of stack.yml and the workflow of workflow.yml; the folder of the functions."""
    where = running.folder.root.parent / "functions"
    shutil.copytree(_ROOT / "functions", where)
    for name, entry in _functions().items():
        running.deploy(
            {
                "service": name,
                "image": entry["image"],
                "envProcess": _PROCESS,
                "envVars": entry.get("environment", {}),
                "labels": entry.get("labels", {}),
                "annotations": entry["annotations"],
            }
        )
    for name in _functions():
        running.ready(name)
    for name in _WARMED:
        call_until_leased(running, name, examples_in(where / name)[0].body)
    workflow = yaml.safe_load((_ROOT / "workflow.yml").read_text(encoding="utf-8"))
    status, body = running.system("POST", "/system/workflows", workflow)
    if status != _ACCEPTED:
        raise MeasurementFailed(f"workflow: {status} {body.decode(errors='replace')}")
    return where


def _functions() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load((_ROOT / "stack.yml").read_text(encoding="utf-8"))
    functions: Mapping[str, Any] = found["functions"]
    return functions


def _remove_examples(running: WholeStack) -> None:
    for name in _functions():
        status, body = running.system("DELETE", "/system/functions", {"functionName": name})
        if status != _ACCEPTED:
            raise MeasurementFailed(f"{name}: {status} {body.decode(errors='replace')}")


def _left(running: WholeStack) -> list[str]:
    """What there still is of calls, leases and functions once all have had time to end."""
    patience_s = time.monotonic() + _REST_S
    while True:
        try:
            left = _present(running)
        except (CommandError, OSError) as error:
            left = [f"{type(error).__name__}: {error}"]
        if not left or time.monotonic() > patience_s:
            return left
        time.sleep(_ASK_S)


def _present(running: WholeStack) -> list[str]:
    tables = sample_tables(running, addresses_of(running))
    found = [
        f"{part}: {tables[part, what]:g} {what}" for part, what in _EMPTY if tables[part, what]
    ]
    processes = [name for name in parts_in_tree(running.pid).values() if "functions" in name]
    if processes:
        found.append(f"{len(processes)} processes of functions")
    return found
