"""What must hold in a simulation: all the time, and once it has come to rest."""

from collections.abc import Iterator

from hunt.seeds.programs.callers import CallersProgram
from hunt.seeds.programs.function_program import FunctionProgram
from hunt.seeds.programs.gateway_program import WORKFLOW, GatewayProgram
from hunt.seeds.programs.node_program import NodeProgram
from hunt.seeds.programs.operator_program import POLICY, WORKFLOW_TEXT, OperatorProgram
from hunt.seeds.programs.scheduler_program import SchedulerProgram
from scheduler.core.core import Core
from scheduler.features.tenants.quotas import Quotas
from scheduler.service.leadership.term import Office
from tests.kit.cores.invariants import check_books


class Verdicts:
    """Looks at every program of a simulation."""

    def __init__(
        self,
        schedulers: list[SchedulerProgram],
        nodes: list[NodeProgram],
        functions: list[FunctionProgram],
        gateways: list[GatewayProgram],
        callers: CallersProgram,
        operator: OperatorProgram,
        *,
        wiped: bool,
    ) -> None:
        """`wiped`: etcd loses its data at some time, and with it perhaps what was set."""
        self._schedulers = schedulers
        self._nodes = nodes
        self._functions = functions
        self._gateways = gateways
        self._callers = callers
        self._operator = operator
        self._wiped = wiped

    def always(self) -> Iterator[str]:
        """What is wrong, whatever has befallen the cluster."""
        for scheduler in self._schedulers:
            office = scheduler.office
            if office is not None:
                yield from _books(scheduler.name, office.core)
        for function in self._functions:
            for call in function.begun_again:
                if not self._callers.calls[call].is_async:
                    yield f"{call} was begun {function.begun[call]} times"

    def at_rest(self) -> Iterator[str]:
        """What is left although nobody calls any more."""
        leading = [each for each in self._schedulers if each.office is not None]
        if len(leading) != 1:
            yield f"{[each.name for each in leading]} lead"
            return
        office = leading[0].office
        assert office is not None, "it leads"
        core = office.core
        if core.requests:
            yield f"the core has requests: {sorted(core.requests)[:5]}"
        if core.leases:
            yield f"the core has leases: {sorted(core.leases)[:5]}"
        programs: list[NodeProgram | GatewayProgram] = [*self._nodes, *self._gateways]
        for program in programs:
            if not program.serves:
                yield f"{program.name} does not serve"
                return
        for node in self._nodes:
            yield from self._of_node(node, core)
        for gateway in self._gateways:
            yield from _of_gateway(gateway)
        yield from self._of_changes(office)
        there = {gpu for node in self._nodes for gpu in node.node.gpus}
        if core.cluster.gpus.keys() != there:
            yield f"the core knows {sorted(core.cluster.gpus)} of {sorted(there)}"

    def of_calls(self) -> Iterator[str]:
        """What was promised to callers and not kept."""
        for record in self._callers.calls.values():
            if record.status is None:
                yield f"{record.id} has no answer"
            elif record.is_accepted:
                if not self._begun(record.id):
                    yield f"{record.id} was accepted and never begun"
                if not record.callbacks:
                    yield f"{record.id} was accepted and never called back"
            elif record.status == 200 and record.is_async:
                yield f"{record.id} was answered as if it were not async"
            elif record.status == 200 and record.why != record.answer:
                yield f"{record.id} has the answer of {record.why}"

    def _begun(self, call: str) -> int:
        return sum(function.begun.get(call, 0) for function in self._functions)

    def _of_changes(self, office: Office) -> Iterator[str]:
        """What operators set holds for the leader, and for every gateway."""
        operator, policy = self._operator, office.core.placer.policy_name
        if not self._wiped:
            if not operator.may_hold(POLICY, policy):
                yield f"{policy} decides, not {operator.accepted.get(POLICY)}"
            owners = [each for each in operator.accepted if each not in (POLICY, WORKFLOW_TEXT)]
            for owner in owners:
                terms = office.feature(Quotas).book.of_operators.get(owner)
                if not operator.may_hold(owner, terms):
                    yield f"{owner} has {terms}, not {operator.accepted[owner]}"
        for gateway in self._gateways:
            table = gateway.workflows
            text = None if table is None else table.texts().get(WORKFLOW)
            if not operator.may_hold(WORKFLOW_TEXT, text):
                yield f"{gateway.name} has another workflow: {text}"

    def _of_node(self, node: NodeProgram, core: Core) -> Iterator[str]:
        if len(node.node.leases):
            yield f"{node.name} has leases: {[lease.id for lease in node.node.leases]}"
        for gpu in node.node.gpus.values():
            known = core.cluster.gpus.get(gpu.id)
            if known is None or not known.active:
                yield f"{gpu.id} is not used by the core"
                continue
            if known.cache.residents.keys() != gpu.residents.keys():
                yield (
                    f"{gpu.id} has {sorted(gpu.residents)}, the core knows "
                    f"{sorted(known.cache.residents)}"
                )
            hosted = {each.order.model for each in gpu.loaded()}
            if hosted != gpu.residents.keys():
                yield f"{gpu.id} has {sorted(gpu.residents)}, loaded are {sorted(hosted)}"
            if gpu.leaving:
                yield f"models leave {gpu.id} for ever"


def _books(who: str, core: Core) -> Iterator[str]:
    try:
        check_books(core)
    except AssertionError as error:
        yield f"the books of {who}: {error}"


def _of_gateway(gateway: GatewayProgram) -> Iterator[str]:
    for function in gateway.functions:
        if function.inflight or function.waiting:
            yield f"{gateway.name}: {function.inflight} calls of {function.id} in flight"
    if kept := len(gateway.pool.standing):
        yield f"{gateway.name} keeps {kept} leases"
    counts = gateway.jobs.tally
    if counts.calls or counts.callbacks:
        yield f"{gateway.name} has jobs: {counts.calls}, {counts.callbacks} callbacks"
