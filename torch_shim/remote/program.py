"""Runs graph calls on a worker.

A call goes through four steps, which pass one value on: `_bind` finds a lease, the weights among
the arguments and a channel to the lease's worker, `_ship` lays the other inputs out, `_wait` sends
the call and waits for the answer, `_receive` makes tensors of it. `Tries` alone says what is done
when one of them fails.
"""

import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from msgspec import structs

from torch_shim.errors import ManagerUnreachable, OtherVersion, RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ModelLeases, SessionLease
from torch_shim.process_report import report
from torch_shim.raised_failures import CRASHES
from torch_shim.remote.recomputation import (
    MOST_COPIED_BYTES,
    RememberedInputs,
    remember,
    remembered_inputs,
)
from torch_shim.remote.values import (
    LEAST_BYTES,
    AnswerLayout,
    Bound,
    OutputHabits,
    OutputView,
    Results,
    Shipment,
    StayingOutputs,
    alias,
    batch_of,
    body_of,
    laid_out,
    overwrite,
    tensor_in,
)
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import RunThere, absent_of, make_for, nowhere, unmade, waiting
from torch_shim.weights import ModelImage
from torch_shim.wire.arithmetic import settings_to_send, turns
from torch_shim.wire.current_call import CallTiming
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.manager_session import WorkerPeer
from torch_shim.wire.messages import STAYS, Call, CallOptions, OutputPart, Record
from torch_shim.wire.programs import Program, digest_of
from torch_shim.wire.protocol import MOST_BINDINGS, FailureKind, Frame, FrameKind
from torch_shim.wire.shared_memory import flat

# A worker keeps results of at least this size, so that they are not resent as inputs.
KEEP_RESULTS_FROM_BYTES = 16 << 10

# Larger results come in a file that is mapped, instead of through the arena from where they would
# have to be copied.
MOST_ARENA_RESULTS = 4 << 20

_programs = itertools.count(1)


class RemoteProgram:
    """A program that workers run, with what its earlier calls have shown."""

    def __init__(self, program: Program, operators: int) -> None:
        self.number = next(_programs)
        self.packed = program.pack()
        self.digest = digest_of(self.packed)
        self.random = program.random
        self.operators = operators
        self._never_bound: frozenset[int] = frozenset()
        self.written: frozenset[int] = frozenset()  # large inputs that it writes to
        self.whole: frozenset[int] = frozenset()  # inputs that outputs lie in
        self.habits = OutputHabits()
        self.result_bytes = 0
        self.gives_large = False  # outputs that remember their call
        # Whether it was called, and has then written to no input, and given none of them.
        self.only_reads: bool | None = None
        self.worth_keeping: list[bool] = []
        self.layout: AnswerLayout | None = None  # of the last answer
        self.recorder = recorders[-1](self.number)
        # The latest for each model, of which all of one structure share the program. What is bound
        # lasts as long as the model's image, since it keeps the weights.
        self._bound: WeakKeyDictionary[ModelImage, list[Bound]] = WeakKeyDictionary()

    def run(self, args: Sequence[Any], leases: ModelLeases) -> list[Any]:
        """Return the outputs that a worker computes.

        Raise RemoteFailure if no worker does, ManagerUnreachable if no GPU manager answers.
        """
        if unmade:
            instead = joined_calls[-1](self, args, leases)
            if instead is not None:
                try:
                    outputs = instead.program.run_now(instead.args, leases)
                except RemoteFailure as failure:  # this one by itself may need less
                    if failure.failure == FailureKind.LOST:
                        raise
                else:
                    if instead.is_right():
                        return outputs
            make_for(args)
        return self.run_now(args, leases)

    def run_now(self, args: Sequence[Any], leases: ModelLeases) -> list[Any]:
        """As `run`, where nothing has to be made before."""
        batch, tries = batch_of(args), Tries()
        with request_context.timed() as timing:
            while True:
                try:
                    held = leases.lease_for(batch)
                except (RemoteFailure, WireError) as error:
                    if not tries.may_follow(error, None, leases):
                        raise
                    continue
                outputs = None
                if self.recorder.is_used and not tries.crashes:
                    outputs = self.recorder.answer(args, held, timing, tries)
                if outputs is None and held.lease.in_force:
                    outputs = self._call(args, held, leases, timing, tries)
                if outputs is not None:
                    return outputs

    def _call(
        self,
        args: Sequence[Any],
        held: SessionLease,
        leases: ModelLeases,
        timing: CallTiming | None,
        tries: "Tries",
    ) -> list[Any] | None:
        """Return the outputs; None if another try has to follow."""
        with ExitStack() as ends:
            call: RemoteCall | None = None
            try:
                call = _bind(self, args, held, leases, ends)
                if call is None:
                    return None
                trace = "" if timing is None else timing.header
                outputs, times = _answer(call, trace, repeats=tries.crashes > 0)
                _remember(call, outputs, leases)
            except (RemoteFailure, WireError) as error:
                if not tries.may_follow(error, call, leases):
                    raise
                return None
            if timing is not None:
                timing.answered(held.lease.number, held.model.digest, batch_of(args), times)
            return outputs

    def bind(self, args: Sequence[Any], model: ModelImage) -> Bound:
        """Return the binding that holds for these arguments."""
        bindings = self._bound.get(model, [])
        for bound in bindings:
            if bound.holds(args):
                return bound
        bound = Bound(args, model, self._never_bound)
        self._bound[model] = [bound, *bindings][:MOST_BINDINGS]
        return bound

    def unbind(self, position: int) -> None:
        """Send this input with every call from now on: the program writes to it."""
        self._never_bound |= {position}
        self._bound = WeakKeyDictionary()


@dataclass(slots=True)
class RemoteCall:
    """One try of a call: the worker has its program and its bound inputs, or will get them."""

    program: RemoteProgram
    args: Sequence[Any]
    held: SessionLease
    bound: Bound
    rng: bytes | None
    channel: DataChannel
    stay: StayingOutputs = field(init=False)
    peer: WorkerPeer = field(init=False)
    answered: bool = False
    is_noted: bool = False  # with what it may be repeated, as follows, if it may
    remembered: RememberedInputs | None = None

    def __post_init__(self) -> None:
        self.peer = self.held.lease.peer

    def ask(self, kind: FrameKind, message: Any, body: Sequence[bytearray] = ()) -> Frame:
        """Send the call and wait for its answer; note meanwhile what it may be repeated with."""
        meanwhile = self.note_inputs if self.program.gives_large else None
        return self.channel.ask(kind, message, body, meanwhile=meanwhile)

    def note_inputs(self) -> None:
        self.is_noted, self.remembered = True, remembered_inputs(self.args, self.bound)

    def give_up(self) -> None:
        """Name again, unless the call was answered, what the function needs no more."""
        if not self.answered:
            self.stay.give_up()

    def end(self) -> None:
        """Give the channel back, and the lease if this was its last call."""
        self.held.lease.session.give(self.held.lease, self.channel)
        self.held.end_call(answered=self.answered)


class CallLook(NamedTuple):
    """What a call is like, why it is not recorded, if that is known, and what else to ask for."""

    kind: Hashable = None
    why_not: str = ""
    record: Record | None = None


class CallRecorder:
    """What repeats calls of one program that are the same again. This one repeats none."""

    is_used = False  # whether a call was recorded

    def __init__(self, program: int) -> None:
        self.program = program

    def answer(
        self, args: Sequence[Any], held: SessionLease, timing: CallTiming | None, tries: "Tries"
    ) -> list[Any] | None:
        """Return the outputs of a call that is recorded; None if it has to be made as ever.

        The lease may be over then.
        """
        del args, held, timing, tries
        return None

    def repeat(self, call: RemoteCall, options: CallOptions) -> tuple[Shipment, Results] | None:
        """Make a call that is recorded but for its state; None if it has to be described."""
        del call, options
        return None

    def look(self, call: RemoteCall, shipment: Shipment) -> CallLook:
        """Look at a call that is about to be sent: whether the worker is to record it."""
        del call, shipment
        return CallLook()

    def note(self, look: CallLook, call: RemoteCall, shipment: Shipment, results: Results) -> None:
        """Note what became of a call that was looked at."""


# The last one makes those of all programs: a feature adds to it.
recorders: list[type[CallRecorder]] = [CallRecorder]


class JoinedCall(NamedTuple):
    """A program that does another one's work, and more, with these inputs.

    Its outputs are the other one's if it `is_right` when they are there.
    """

    program: RemoteProgram
    args: list[Any]
    is_right: Callable[[], bool]


def _joins_none(*_: Any) -> JoinedCall | None:
    return None


JoinTo = Callable[[RemoteProgram, Sequence[Any], ModelLeases], JoinedCall | None]
# The last one joins to a call what makes inputs of it: a feature adds to it.
joined_calls: list[JoinTo] = [_joins_none]

# The last one says what runs operators on outputs of calls that stay with their worker.
operators_there: list[Callable[[ModelLeases], RunThere]] = [lambda _: nowhere]


def _bind(
    program: RemoteProgram,
    args: Sequence[Any],
    held: SessionLease,
    leases: ModelLeases,
    ends: ExitStack,
) -> RemoteCall | None:
    """Return a call on a channel of a lease's worker; None if the lease has ended."""
    bound = program.bind(args, held.model)
    _bring_from_others(args, bound, held.lease.peer)
    rng = ends.enter_context(turns.state(drawn_from=program.random))
    channel = held.lease.session.channel(held.lease, batch_of(args))
    if channel is None:
        held.lease.over = True
        return None
    held.begin_call()
    call = RemoteCall(program, args, held, bound, rng, channel)
    ends.callback(call.end)
    call.stay = StayingOutputs(program.habits, call.peer, operators_there[-1](leases))
    ends.callback(call.give_up)
    return call


def _answer(call: RemoteCall, trace: str, *, repeats: bool) -> tuple[list[Any], Sequence[float]]:
    autocast, dtype, arithmetic = settings_to_send()
    residents = call.stay.residents
    while True:
        keys = [write_epochs.new_key() if keep else 0 for keep in call.program.worth_keeping]
        options = CallOptions(
            autocast, call.rng, keys, dtype, trace, arithmetic, residents, repeats
        )
        repeated = call.program.recorder.repeat(call, options)
        if repeated is None:
            shipment = _ship(call)
            repeated = shipment, _wait(call, shipment, options)
        shipment, results = repeated
        aliased = results.aliased_inputs()
        copies = {position for position in aliased if shipment.is_copy(position)}
        copies -= call.program.whole
        call.program.whole |= aliased
        if not copies or results.changed:
            return _receive(call, shipment, results, keys), results.times
        # Where in an input an output lies cannot be told from a copy: these are sent as they lie.
        # A program that writes does not run twice: its output is one of the copy.


def _ship(call: RemoteCall) -> Shipment:
    """Lay out the inputs that the worker lacks; it gets program and binding unless it has them."""
    program, bound, channel = call.program, call.bound, call.channel
    channel.define(program.number, program.digest, program.packed)
    channel.bind(program.number, bound.number, bound.tensors)
    # Nobody knows in which inputs the outputs of a first call lie.
    whole = program.whole if program.only_reads is not None else frozenset(bound.others)
    return Shipment(call.args, bound.others, channel, call.peer, program.written, whole)


def _wait(call: RemoteCall, shipment: Shipment, options: CallOptions) -> Results:
    """Send the call with its inputs, and wait for the worker's answer, which is checked."""
    program, channel = call.program, call.channel
    if channel.wire.local:
        arena = channel.room(shipment.size_bytes + program.result_bytes)
        shipment.write(arena)
    look = program.recorder.look(call, shipment)
    if look.record is not None:
        options = structs.replace(options, record=look.record)
    message = Call(
        call.held.lease.number, program.number, call.bound.number, shipment.inputs, options
    )
    if channel.wire.local:
        body: tuple[bytearray, ...] = ()
    else:
        body = (bytearray(shipment.size_bytes),)
        shipment.write(body[0])
    frame = call.ask(FrameKind.CALL, message, body)
    shipment.delivered()
    results = Results(frame, channel, call.peer, call.args, program.layout)
    program.layout = results.layout
    program.recorder.note(look, call, shipment, results)
    return results


def _receive(
    call: RemoteCall, shipment: Shipment, results: Results, keys: Sequence[int]
) -> list[Any]:
    """Return the outputs, after the changes that the program made to its inputs."""
    program, stay = call.program, call.stay
    reads = not results.changed and results.layout.gives_no_input
    program.only_reads = reads and program.only_reads is not False
    program.result_bytes = min(max(program.result_bytes, results.size_bytes), MOST_ARENA_RESULTS)
    program.worth_keeping = [
        part.size_bytes >= KEEP_RESULTS_FROM_BYTES for part in results.storages
    ]
    owned = [
        stay.output(number, part.size_bytes)
        if part.offset == STAYS
        else results.bytes_at(part.offset, part.size_bytes)
        for number, part in enumerate(results.storages)
    ]
    _change_inputs(call, shipment, results)
    if results.rng is not None:
        turns.drawn(call.rng, results.rng)
    outputs = []
    for described in results.views:
        if not isinstance(described, OutputView):
            outputs.append(described)
        elif described.source >= 0:
            output = tensor_in(owned[described.source], described)
            part = results.storages[described.source]
            if part.offset == STAYS or part.size_bytes > MOST_COPIED_BYTES:
                stay.large.append(len(outputs))
            key = keys[described.source] if described.source < len(keys) else 0
            if _note_kept(call.peer, output, part, key):
                results.note_origin(output, described.source)
            outputs.append(output)
        else:
            position = -1 - described.source
            outputs.append(alias(call.args[position], shipment.sent.get(position), described))
    moved, recorded = (shipment.size_bytes, results.size_bytes), results.is_as_recorded
    report.graph_call(program.operators, *moved, results.times, recorded=recorded)
    call.answered = True
    return outputs


def _change_inputs(call: RemoteCall, shipment: Shipment, results: Results) -> None:
    # Those first whose bytes may have to be fetched: a worker that dies at it has changed nothing
    # here yet, and the call is repeated.
    changes = sorted(results.changed, key=lambda change: change.offset != STAYS)
    for number, change in enumerate(changes):
        position, size = change.position, change.size_bytes
        value, sent = call.args[position], shipment.sent.get(position)
        call.stay.repeatable = False
        if sent is None:
            call.program.unbind(position)
        if change.offset != STAYS:
            data = results.bytes_at(change.offset, size)
            with torch.no_grad():
                value.copy_(laid_out(data, value if sent is None else sent.value))
                if shipment.is_copy(position):  # outputs may lie in that
                    shipment.sent[position].value.copy_(value)
        # It may have changed already, through another input over the same storage.
        elif not (shipment.has_changed(value) or call.stay.changed(value)):
            _fetch_change(call.channel, call.peer, value, first=number == 0)
        write_epochs.note_write(value)
        shipment.changed(position, value)
        if size >= LEAST_BYTES:
            call.program.written |= {position}


def _fetch_change(
    channel: DataChannel, peer: WorkerPeer, value: torch.Tensor, *, first: bool
) -> None:
    """Fetch the bytes of an input that the worker wrote to and keeps."""
    mark = write_epochs.marked(value)
    _, epoch = peer.kept.epochs[mark.key]
    try:
        frame = channel.fetch(mark.key, epoch + 1)
    except RemoteFailure as failure:  # to run the program again would be to write twice
        raise RemoteFailure(FailureKind.LOST, failure.message, failure.facts) from failure
    except WireError as error:
        if first:
            raise
        raise RemoteFailure(FailureKind.LOST, f"a call's changes are lost: {error}") from error
    size = write_epochs.storage_of(value).nbytes()
    overwrite(value, flat(body_of(frame, size), torch.uint8, 0, size))


def _note_kept(peer: WorkerPeer, output: torch.Tensor, part: OutputPart, key: int) -> bool:
    """Record which content the worker keeps, if it keeps this output; whether both have it."""
    stays = part.offset == STAYS
    if not stays and not (key and part.kept):
        return False
    mark = write_epochs.mark_storage(write_epochs.storage_of(output), 0 if stays else key)
    peer.kept.result(mark.key, (mark.epoch, write_epochs.version_of(output)))
    if not stays:  # else its `AbsentBytes` says when nobody needs it
        mark.held_by(peer)
    return not stays


def _remember(call: RemoteCall, outputs: list[Any], leases: ModelLeases) -> None:
    """Have large outputs remember the call, which may have to be repeated for them."""
    stay, program = call.stay, call.program
    if stay.large and stay.repeatable and not program.random:
        program.gives_large = True
        if not call.is_noted:
            call.note_inputs()
        if call.remembered is not None:
            made = [(number, outputs[number]) for number in stay.large]
            remember(partial(program.run_now, leases=leases), call.remembered, call.bound, made)


def _bring_from_others(args: Sequence[Any], bound: Bound, peer: WorkerPeer) -> None:
    """Fetch inputs that another worker has, before this one's channel is taken.

    Two threads that each held a channel and waited for the other's would wait for ever.
    """
    for number in bound.others if waiting else ():
        value = args[number]
        lacks = absent_of(value) if isinstance(value, torch.Tensor) else None
        if lacks is not None and lacks.holder is not None and not lacks.holder.is_with(peer):
            lacks.bring()


# The one rule for trying again. A call has no side effects before its answer has been read, so it
# may be repeated: with a new lease where the worker refuses the lease, with all that it lacks where
# the worker has lost something, once with the weights where the node has lost those, and once where
# a connection broke.

_MOST_RESENDS = 5  # of what a worker has lost
_MOST_CRASHES = 2
_MOST_LOST_MANAGERS = 2
# A worker's end is one crash, however many connections its manager still makes to it.
_MOST_TO_DEAD_WORKERS, _PAUSE_S = 20, 0.025
# Workers that end within this time of each other: a host without memory ends several at once.
_TOGETHER_S, _AFTERWARDS_S = 1.0, 0.5


class Tries:
    """The tries of one call: counts what failed, and raises an error when that was too much."""

    # Of the class until something fails: every call has an object of it.
    crashes = 0
    _resent_image = False
    _resends = 0
    _crashed_s = 0.0
    _excused = False
    _managers = 0
    _broken: tuple[str, ...] = ()  # the workers whose channels broke

    def may_follow(
        self, error: RemoteFailure | WireError, call: RemoteCall | None, leases: ModelLeases
    ) -> bool:
        """Whether another try may follow after this error, of a call that has a channel or not."""
        if isinstance(error, WireError):
            if call is None:
                self.lose_manager(error)
            else:
                call.held.lease.session.mark_lost(call.held.lease)
                self.lose_worker(call.peer.name, error)
        elif error.failure == FailureKind.UNKNOWN_MODEL and not self._resent_image:
            self._resent_image = True  # the manager has been restarted
            leases.forget_image()
        elif call is None:
            return False
        elif error.failure == FailureKind.LEASE:
            call.held.lease.over = True
        elif error.failure == FailureKind.MISSING and self._resends < _MOST_RESENDS:
            self._resends += 1
            call.peer.kept.forget(error.facts.get("missing", []))
            call.channel.forget(call.program.number)
        else:
            return False
        return True

    def lose_worker(self, worker: str, error: WireError) -> None:
        """Count a broken channel; wait, where the manager has not seen the worker's end yet.

        RemoteFailure if the call has lost as many workers as a call may.
        """
        self._broken = (*self._broken, worker)
        if 1 < self._broken.count(worker) <= _MOST_TO_DEAD_WORKERS:
            time.sleep(_PAUSE_S)
            return
        report.add(repeated_calls=1)
        now_s = time.monotonic()
        if self.crashes and not self._excused and now_s < self._crashed_s + _TOGETHER_S:
            self._excused = True
            time.sleep(_AFTERWARDS_S)
            return
        self.crashes, self._crashed_s = self.crashes + 1, now_s
        if self.crashes >= _MOST_CRASHES:
            message = f"connections broke {self.crashes} times in this call ({error})"
            facts = {CRASHES: self.crashes}
            raise RemoteFailure(FailureKind.LOST, message, facts) from error

    def lose_manager(self, error: WireError) -> None:
        """Count a GPU manager that was lost, or cannot be reached: no call is to blame for that.

        ManagerUnreachable or RemoteFailure if it happened as often as a call may bear, and
        OtherVersion at once: it speaks the same version next time.
        """
        if isinstance(error, OtherVersion):
            raise error
        report.add(repeated_calls=1)
        self._managers += 1
        if self._managers < _MOST_LOST_MANAGERS:
            return
        if isinstance(error, ManagerUnreachable):
            raise error
        message = f"the GPU manager was lost {self._managers} times in this call ({error})"
        raise RemoteFailure(FailureKind.LOST, message) from error
