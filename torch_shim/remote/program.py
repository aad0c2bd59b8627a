"""Runs one graph call on a worker: binds the weights, sends the inputs, reads the results."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from torch_shim.errors import ManagerUnreachable, OtherVersion, RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.leasing import SessionLease
from torch_shim.process_report import report
from torch_shim.raised_failures import CRASHES
from torch_shim.remote.call_settings import (
    arithmetic_to_send,
    autocast_to_send,
    dtype_to_send,
    turns,
)
from torch_shim.remote.inputs import Bindings, Bound, Shipment
from torch_shim.remote.recomputation import MOST_COPIED_BYTES, CallOptions, remember
from torch_shim.remote.results import (
    LEAST_BYTES,
    STAYS,
    AliasOfCopy,
    AnswerLayout,
    OutputHabits,
    OutputView,
    Results,
    StayingOutputs,
    alias,
    body_of,
    laid_out,
    overwrite,
    view,
)
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import RunThere, absent_of, waiting
from torch_shim.tensors.handles import CudaParameter
from torch_shim.wire.current_call import CallTiming
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.manager_session import ModelLease
from torch_shim.wire.programs import Program, digest_of
from torch_shim.wire.protocol import FailureKind
from torch_shim.wire.shared_memory import flat
from torch_shim.wire.worker_peer import DataChannel, WorkerPeer

# How often one call may resend what a worker has lost before the call fails.
MOST_RESENDS = 5

# A worker keeps results of at least this size, so that they are not resent as inputs.
KEEP_RESULTS_FROM_BYTES = 16 << 10

# Larger results come in a file that is mapped, instead of through the arena from where they would
# have to be copied.
MOST_ARENA_RESULTS = 4 << 20

_programs = itertools.count(1)


class RemoteProgram:
    """A program that workers run, with measurements of its earlier calls."""

    def __init__(self, program: Program, operators: int) -> None:
        self.number = next(_programs)
        self.packed = program.pack()
        self.digest = digest_of(self.packed)
        self.random = program.random
        self.operators = operators
        self.never_bound: frozenset[int] = frozenset()
        self._written: frozenset[int] = frozenset()  # large inputs that it writes to
        self._whole: frozenset[int] = frozenset()  # inputs that outputs lie in
        self._habits = OutputHabits()
        self._result_bytes = 0
        self._worth_keeping: list[bool] = []
        self._bindings = Bindings()
        self._layout: AnswerLayout | None = None  # of the last answer

    def run(
        self,
        args: Sequence[Any],
        lease_for: Callable[[int], SessionLease],
        run_there: RunThere,
    ) -> list[Any]:
        """Return the outputs that a worker computes.

        Raise RemoteFailure if no worker does, ManagerUnreachable if no GPU manager answers.
        `lease_for` returns a lease for a batch size, and a new one when the former has ended;
        `run_there` runs operators on what stays with the worker.
        """
        with request_context.timed() as timing:
            return self._run(args, lease_for, run_there, timing)

    def settings(self) -> Any:
        """Return what of this process changes the numbers that the program computes."""
        return autocast_to_send(), dtype_to_send(), arithmetic_to_send()

    def _run(
        self,
        args: Sequence[Any],
        lease_for: Callable[[int], SessionLease],
        run_there: RunThere,
        timing: CallTiming | None,
    ) -> list[Any]:
        batch = _batch(args)
        broken, resends = BrokenConnections(), 0
        while True:
            with ExitStack() as turn:
                try:
                    session_lease = lease_for(batch)
                    session, model, lease, _ = session_lease
                    bound = self._bindings.find(args, model, self.never_bound)
                    _bring_from_others(args, bound, lease.peer)
                    rng = turn.enter_context(turns.state(drawn_from=self.random))
                    channel = session.channel(lease, batch)
                except WireError as error:
                    broken.of_manager(error)
                    continue
                if channel is None:
                    lease.over = True
                    continue
                answered = False
                session_lease.begin_call()
                try:
                    stay = StayingOutputs(self._habits, lease.peer, run_there)
                    trace = "" if timing is None else timing.header
                    extras = _Extras(trace, arithmetic_to_send(), stay, broken.crashes > 0)
                    outputs, times = self._once(args, bound, channel, lease, rng, extras)
                    answered = True
                    self._remember(args, bound, CallOptions(lease_for, run_there), outputs, extras)
                    if timing is not None:
                        timing.answered(lease.number, model.digest, batch, times)
                except RemoteFailure as failure:
                    if failure.failure == FailureKind.LEASE:
                        lease.over = True
                    elif failure.failure == FailureKind.MISSING and resends < MOST_RESENDS:
                        resends += 1
                        self._forget(channel, lease.peer, failure)
                    else:
                        raise
                except WireError as error:
                    session.mark_lost(lease)
                    broken.of_worker(lease.peer.name, error)
                else:
                    return outputs
                finally:
                    session.give(lease, channel)
                    session_lease.end_call(answered=answered)

    def _remember(
        self,
        args: Sequence[Any],
        bound: Bound,
        how: CallOptions,
        outputs: list[Any],
        extras: "_Extras",
    ) -> None:
        """Have the outputs remember their call, in case that a worker dies."""
        stay = extras.stay
        if stay.large and stay.repeatable and not self.random:
            made = [(number, outputs[number]) for number in stay.large]
            remember(self, args, bound, how, made)

    def _once(
        self,
        args: Sequence[Any],
        bound: Bound,
        channel: DataChannel,
        lease: ModelLease,
        rng: bytes | None,
        extras: "_Extras",
    ) -> tuple[list[Any], list[float]]:
        try:
            while True:
                try:
                    return self._ask(args, bound, channel, lease, rng, extras)
                except AliasOfCopy as alias_found:
                    self._whole |= alias_found.positions
        except BaseException:
            extras.stay.give_up()
            raise

    def _ask(
        self,
        args: Sequence[Any],
        bound: Bound,
        channel: DataChannel,
        lease: ModelLease,
        rng: bytes | None,
        extras: "_Extras",
    ) -> tuple[list[Any], list[float]]:
        channel.define(self.number, self.digest, self.packed)
        channel.bind(self.number, bound.number, bound.tensors)
        unbound = [(position, args[position]) for position in bound.others]
        shipment = Shipment(unbound, len(args), channel, lease.peer, self._written, self._whole)
        keys = [write_epochs.new_key() if keep else 0 for keep in self._worth_keeping]
        options = [autocast_to_send(), rng, keys, dtype_to_send(), *extras.fields()]
        meta = [lease.number, self.number, bound.number, shipment.inputs, options]
        if channel.wire.local:
            arena = channel.room(shipment.size_bytes + self._result_bytes)
            shipment.write(arena.memory)
            frame = channel.call(meta, ())
        else:
            body = bytearray(shipment.size_bytes)
            shipment.write(body)
            frame = channel.call(meta, (body,))
        shipment.delivered()
        answer = _Answer(frame, channel, shipment, lease.peer, keys, extras.stay, rng)
        return self._read(answer, args)

    def _read(self, answer: "_Answer", args: Sequence[Any]) -> tuple[list[Any], list[float]]:
        results = Results(answer.frame, answer.channel, answer.peer, args, self._layout)
        self._layout = results.layout
        shipment = answer.shipment
        results.check_aliases(shipment)
        self._result_bytes = min(max(self._result_bytes, results.size_bytes), MOST_ARENA_RESULTS)
        self._worth_keeping = [entry[1] >= KEEP_RESULTS_FROM_BYTES for entry in results.storages]
        owned = [
            answer.resident(number, size) if offset == STAYS else results.bytes_at(offset, size)
            for number, (offset, size, _) in enumerate(results.storages)
        ]
        # Those first whose bytes may have to be fetched: a worker that dies at it has changed
        # nothing here yet, and the call is repeated.
        changes = sorted(results.changed, key=lambda change: change[1] != STAYS)
        for number, (position, offset, size) in enumerate(changes):
            data = None if offset == STAYS else results.bytes_at(offset, size)
            self._change(args[position], data, answer, position, first=number == 0)
            if size >= LEAST_BYTES:
                self._written |= {position}
        if results.rng is not None:
            turns.drawn(answer.rng, results.rng)
        outputs = []
        for described in results.views:
            if not isinstance(described, OutputView):
                outputs.append(described)
            elif described.source >= 0:
                output = view(owned[described.source], described)
                answer.note_large(len(outputs), results.storages[described.source])
                if answer.note_kept(output, described.source, results.storages[described.source]):
                    results.note_origin(output, described.source)
                outputs.append(output)
            else:
                position = -1 - described.source
                outputs.append(alias(args[position], shipment.sent(position), described))
        report.graph_call(self.operators, shipment.size_bytes, results.size_bytes, results.times)
        return outputs, results.times

    def _change(
        self,
        value: torch.Tensor,
        data: torch.UntypedStorage | None,
        answer: "_Answer",
        position: int,
        *,
        first: bool,
    ) -> None:
        shipment = answer.shipment
        answer.stay.repeatable = False
        sent = shipment.sent(position)
        if sent is None:
            self.never_bound |= {position}
            self._bindings = Bindings()
        if data is None:
            if not shipment.has_changed(value):  # through another input over the same storage
                answer.stay_changed(value, first=first)
        else:
            new = laid_out(data, value if sent is None else sent.value)
            with torch.no_grad():
                value.copy_(new)
        write_epochs.note_write(value)
        shipment.changed(position, value)

    def _forget(self, channel: DataChannel, peer: WorkerPeer, failure: RemoteFailure) -> None:
        peer.kept.forget(failure.facts.get("missing", []))
        channel.defined.discard(self.number)
        channel.bound.pop(self.number, None)


class _Extras(NamedTuple):
    """The options of a call that say how it is run, not what is computed.

    One that `repeats` another was in a worker that died.
    """

    trace: str
    arithmetic: list[Any] | None
    stay: StayingOutputs
    repeats: bool

    def fields(self) -> list[Any]:
        return [self.trace, self.arithmetic, self.stay.option, self.repeats]


class _Answer(NamedTuple):
    """A worker's answer, with what is needed to read it."""

    frame: Frame
    channel: DataChannel
    shipment: Shipment
    peer: WorkerPeer
    keys: list[int]
    stay: StayingOutputs
    rng: bytes | None

    def resident(self, number: int, size_bytes: int) -> torch.UntypedStorage:
        """Return the storage of an output whose bytes stay with the worker."""
        return self.stay.output(number, size_bytes)

    def note_large(self, number: int, entry: list[int]) -> None:
        """Record an output that stayed, or that is too large to be copied as an input."""
        if entry[0] == STAYS or entry[1] > MOST_COPIED_BYTES:
            self.stay.large.append(number)

    def note_kept(self, output: torch.Tensor, number: int, entry: list[int]) -> bool:
        """Record which content the worker keeps, if it keeps this output; whether both have it."""
        key = self.keys[number] if number < len(self.keys) and entry[0] != STAYS else 0
        if entry[0] == STAYS or (key and entry[2]):
            mark = write_epochs.mark_storage(write_epochs.storage_of(output), key)
            self.peer.kept.result(mark.key, (mark.epoch, write_epochs.version_of(output)))
            if entry[0] != STAYS:  # else its `AbsentBytes` says when nobody needs it
                mark.held_by(self.peer)
                return True
        return False

    def stay_changed(self, value: torch.Tensor, *, first: bool) -> None:
        """Note that the worker wrote to an input that it keeps; fetch the bytes if need be."""
        if self.stay.changed(value):
            return
        mark = write_epochs.marked(value)
        _, epoch = self.peer.kept.epochs[mark.key]
        try:
            frame = self.channel.fetch(mark.key, epoch + 1)
        except RemoteFailure as failure:  # to run the program again would be to write twice
            raise RemoteFailure(FailureKind.LOST, failure.message, failure.facts) from failure
        except WireError as error:
            if first:
                raise
            raise RemoteFailure(FailureKind.LOST, f"a call's changes are lost: {error}") from error
        size = write_epochs.storage_of(value).nbytes()
        overwrite(value, flat(body_of(frame, size), torch.uint8, 0, size))


def _bring_from_others(args: Sequence[Any], bound: Bound, peer: WorkerPeer) -> None:
    """Fetch inputs that another worker has, before this one's channel is taken.

    Two threads that each held a channel and waited for the other's would wait for ever.
    """
    for number in bound.others if waiting else ():
        value = args[number]
        lacks = absent_of(value) if isinstance(value, torch.Tensor) else None
        if lacks is not None and lacks.holder is not None and not lacks.holder.is_with(peer):
            lacks.bring()


def _batch(args: Sequence[Any]) -> int:
    for value in args:
        # Torch answers the last question in Python: weights, the most frequent, are told by class.
        if (
            type(value) is not CudaParameter
            and isinstance(value, torch.Tensor)
            and not isinstance(value, torch.nn.Parameter)
        ):
            shape = value.size()
            return shape[0] if shape else 1
    return 1


# Broken connections of one call: a call has no side effects, and may be repeated once.

_MOST_CRASHES = 2
_MOST_LOST_MANAGERS = 2
# A worker's end is one crash, however many connections its manager still makes to it.
_MOST_TO_DEAD_WORKERS, _PAUSE_S = 20, 0.025
# Workers that end within this time of each other: a host without memory ends several at once.
_TOGETHER_S, _AFTERWARDS_S = 1.0, 0.5


class BrokenConnections:
    """Counts what broke under one call, and raises an error when that was too much."""

    def __init__(self) -> None:
        self.crashes = 0
        self._crashed_s = 0.0
        self._excused = False
        self._managers = 0
        self._by_worker: Counter[str] = Counter()

    def of_worker(self, worker: str, error: WireError) -> None:
        """Count a broken channel; wait, where the manager has not seen the worker's end yet.

        RemoteFailure if the call has lost as many workers as a call may.
        """
        self._by_worker[worker] += 1
        if 1 < self._by_worker[worker] <= _MOST_TO_DEAD_WORKERS:
            time.sleep(_PAUSE_S)
        else:
            self._crashed(error)

    def of_manager(self, error: WireError) -> None:
        """Count a GPU manager that was lost, or cannot be reached: no call is to blame for that.

        ManagerUnreachable or RemoteFailure if it happened as often as a call may bear, and
        OtherVersion at once: it speaks the same version next time.
        """
        if isinstance(error, OtherVersion):
            raise error
        report.add("repeated_calls", 1)
        self._managers += 1
        if self._managers < _MOST_LOST_MANAGERS:
            return
        if isinstance(error, ManagerUnreachable):
            raise error
        message = f"the GPU manager was lost {self._managers} times in this call ({error})"
        raise RemoteFailure(FailureKind.LOST, message) from error

    def _crashed(self, error: WireError) -> None:
        report.add("repeated_calls", 1)
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
