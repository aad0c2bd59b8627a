"""Who is called: functions, workflows, batches and tenants on emulated GPUs, as they come."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.gateway import bench_functions
from bench.gateway.bench_stacks import call_until_leased
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import WholeStack
from bench.overload.offered_loads import CallKind
from gateway_ext.settings import GatewaySettings

RUN_S = 0.05
_LOAD_S = 0.25
_GPUS = (
    *("--devices", "cpu:2", "--gpu-memory", "1GiB"),
    *("--emulate-run", f"{RUN_S:g}", "--emulate-load", f"{_LOAD_S:g}"),
)
_FOUR, _TOGETHER = 4, 4
_CALM, _FLOOD, _LIGHT, _HEAVY = "calm", "flood", "light", "heavy"
_CALM_PART, _HEAVY_WEIGHT = 0.25, 3.0
_FLOOD_TERMS = {"leases": 1, "waiting": 20}
_ACCEPTED = 202


def _nothing_more(_running: WholeStack) -> None:
    """What is deployed is as it comes."""


@dataclass(frozen=True, slots=True)
class OverloadCase:
    """What is deployed, and what is called.

    `deploy` gets a stack that is up; `restrict` sets terms once the capacity is known. A call waits
    at each of its `stages` for a turn, and then computes for `run_s`.
    """

    name: str
    title: str
    kinds: tuple[CallKind, ...]
    deploy: Callable[[WholeStack], None]
    options: tuple[str, ...] = _GPUS
    restrict: Callable[[WholeStack], None] = _nothing_more
    stages: int = 1
    run_s: float = RUN_S

    @property
    def bound_s(self) -> float:
        """The longest wait that the default settings allow, with the work itself."""
        return self.stages * (GatewaySettings().max_wait_s + self.run_s)


def _plain(running: WholeStack) -> None:
    running.deploy(bench_functions.busy())
    running.ready(bench_functions.BUSY)


def _models(count: int) -> Callable[[WholeStack], None]:
    def deploy(running: WholeStack) -> None:
        for number in range(count):
            _with_lease(running, bench_functions.model(number))

    return deploy


def _workflow(running: WholeStack) -> None:
    _models(2)(running)
    first, second = (bench_functions.model_name(number) for number in range(2))
    stages = {"first": {"function": first}, "second": {"function": second, "after": ["first"]}}
    file = {"workflow": "pair", "stages": stages}
    status, body = running.system("POST", "/system/workflows", file)
    if status != _ACCEPTED:
        raise MeasurementFailed(f"workflow: {status} {body.decode(errors='replace')}")


def _lists(running: WholeStack) -> None:
    _with_lease(running, bench_functions.lists(_TOGETHER))


def _tenants(*namespaces: str) -> Callable[[WholeStack], None]:
    """The same function in each of these namespaces, which share no model."""

    def deploy(running: WholeStack) -> None:
        for number, namespace in enumerate(namespaces):
            running.add_namespace(namespace)
            _with_lease(running, {**bench_functions.model(number), "namespace": namespace})

    return deploy


def _with_lease(running: WholeStack, deployment: Mapping[str, object]) -> None:
    """Deploy a function, and call it until the gateway has leases for it."""
    running.deploy(deployment)
    namespace = deployment.get("namespace")
    name = f"{deployment['service']}" + (f".{namespace}" if namespace else "")
    running.ready(name)
    call_until_leased(running, name, b"")


def _quota(running: WholeStack) -> None:
    running.administrator.put(f"/quotas/{_FLOOD}", _FLOOD_TERMS)


def _shares(running: WholeStack) -> None:
    running.set_policy("fair")
    running.administrator.put(f"/quotas/{_HEAVY}", {"weight": _HEAVY_WEIGHT})


def _path(number: int, namespace: str = "") -> str:
    return f"/function/{bench_functions.model_name(number)}" + (
        f".{namespace}" if namespace else ""
    )


def _model_kind(number: int) -> CallKind:
    return CallKind(bench_functions.model_name(number), _path(number))


CASES = (
    OverloadCase(
        name="plain",
        title="A function without a GPU that computes for 3 ms",
        kinds=(CallKind("busy", f"/function/{bench_functions.BUSY}"),),
        deploy=_plain,
        run_s=0.003,
    ),
    OverloadCase(
        name="one",
        title="One function on two GPUs",
        kinds=(_model_kind(0),),
        deploy=_models(1),
    ),
    OverloadCase(
        name="four",
        title="Four functions that compete for two GPUs",
        kinds=tuple(_model_kind(number) for number in range(_FOUR)),
        deploy=_models(_FOUR),
    ),
    OverloadCase(
        name="workflow",
        title="A workflow of two functions",
        kinds=(CallKind("pair", "/workflow/pair"),),
        deploy=_workflow,
        stages=2,
    ),
    OverloadCase(
        name="merged",
        title="One function with four leases a GPU, whose calls run as one",
        kinds=(_model_kind(0),),
        deploy=_models(1),
        options=(*_GPUS, "--gpu-overlap", "4"),
    ),
    OverloadCase(
        name="lists",
        title="A handler that takes lists of four calls",
        kinds=(CallKind(bench_functions.LISTS, f"/function/{bench_functions.LISTS}"),),
        deploy=_lists,
    ),
    OverloadCase(
        name="quotas",
        title="A namespace with a quota of one lease and 20 waiting floods, another one is calm",
        kinds=(
            CallKind(_CALM, _path(0, _CALM), steady=_CALM_PART),
            CallKind(_FLOOD, _path(1, _FLOOD), limited=True),
        ),
        deploy=_tenants(_CALM, _FLOOD),
        restrict=_quota,
    ),
    OverloadCase(
        name="fair",
        title="Two namespaces with weights of 1 and 3 under the policy fair",
        kinds=(
            CallKind(_LIGHT, _path(0, _LIGHT)),
            CallKind(_HEAVY, _path(1, _HEAVY), weight=_HEAVY_WEIGHT),
        ),
        deploy=_tenants(_LIGHT, _HEAVY),
        restrict=_shares,
    ),
)
