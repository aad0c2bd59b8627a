"""Runs one graph call on a worker: binds the weights, sends the inputs, reads the results."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
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
from torch_shim.remote.recomputation import MOST_COPIED_BYTES, remember
from torch_shim.remote.results import (
    LEAST_BYTES,
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
from torch_shim.wire.messages import STAYS, Call, CallOptions, OutputPart
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
                    attempt = _Attempt(args, bound, channel, lease, rng, stay)
                    trace = "" if timing is None else timing.header
                    outputs, times = self._once(attempt, trace, repeats=broken.crashes > 0)
                    answered = True
                    if stay.large and stay.repeatable and not self.random:
                        made = [(number, outputs[number]) for number in stay.large]
                        again = partial(self.run, lease_for=lease_for, run_there=run_there)
                        remember(again, args, bound, made)
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

    def _once(
        self, attempt: "_Attempt", trace: str, *, repeats: bool
    ) -> tuple[list[Any], Sequence[float]]:
        try:
            arithmetic = arithmetic_to_send()
            while True:
                keys = [write_epochs.new_key() if keep else 0 for keep in self._worth_keeping]
                options = CallOptions(
                    autocast_to_send(),
                    attempt.rng,
                    keys,
                    dtype_to_send(),
                    trace,
                    arithmetic,
                    attempt.stay.residents,
                    repeats,
                )
                try:
                    return self._ask(attempt, options)
                except AliasOfCopy as alias_found:
                    self._whole |= alias_found.positions
        except BaseException:
            attempt.stay.give_up()
            raise

    def _ask(self, attempt: "_Attempt", options: CallOptions) -> tuple[list[Any], Sequence[float]]:
        args, bound, channel = attempt.args, attempt.bound, attempt.channel
        channel.define(self.number, self.digest, self.packed)
        channel.bind(self.number, bound.number, bound.tensors)
        unbound = [(position, args[position]) for position in bound.others]
        shipment = Shipment(unbound, len(args), channel, attempt.peer, self._written, self._whole)
        call = Call(attempt.lease.number, self.number, bound.number, shipment.inputs, options)
        if channel.wire.local:
            arena = channel.room(shipment.size_bytes + self._result_bytes)
            shipment.write(arena.memory)
            frame = channel.call(call, ())
        else:
            body = bytearray(shipment.size_bytes)
            shipment.write(body)
            frame = channel.call(call, (body,))
        shipment.delivered()
        return self._read(frame, attempt, shipment, options.keys)

    def _read(
        self, frame: Frame, attempt: "_Attempt", shipment: Shipment, keys: list[int]
    ) -> tuple[list[Any], Sequence[float]]:
        args, stay = attempt.args, attempt.stay
        results = Results(frame, attempt.channel, attempt.peer, args, self._layout)
        self._layout = results.layout
        results.check_aliases(shipment)
        self._result_bytes = min(max(self._result_bytes, results.size_bytes), MOST_ARENA_RESULTS)
        self._worth_keeping = [
            part.size_bytes >= KEEP_RESULTS_FROM_BYTES for part in results.storages
        ]
        owned = [
            stay.output(number, part.size_bytes)
            if part.offset == STAYS
            else results.bytes_at(part.offset, part.size_bytes)
            for number, part in enumerate(results.storages)
        ]
        # Those first whose bytes may have to be fetched: a worker that dies at it has changed
        # nothing here yet, and the call is repeated.
        changes = sorted(results.changed, key=lambda change: change.offset != STAYS)
        for number, change in enumerate(changes):
            position, offset, size = change.position, change.offset, change.size_bytes
            data = None if offset == STAYS else results.bytes_at(offset, size)
            self._change(attempt, shipment, position, data, first=number == 0)
            if size >= LEAST_BYTES:
                self._written |= {position}
        if results.rng is not None:
            turns.drawn(attempt.rng, results.rng)
        outputs = []
        for described in results.views:
            if not isinstance(described, OutputView):
                outputs.append(described)
            elif described.source >= 0:
                output = view(owned[described.source], described)
                part = results.storages[described.source]
                if part.offset == STAYS or part.size_bytes > MOST_COPIED_BYTES:
                    stay.large.append(len(outputs))
                key = keys[described.source] if described.source < len(keys) else 0
                if attempt.note_kept(output, part, key):
                    results.note_origin(output, described.source)
                outputs.append(output)
            else:
                position = -1 - described.source
                outputs.append(alias(args[position], shipment.sent(position), described))
        report.graph_call(self.operators, shipment.size_bytes, results.size_bytes, results.times)
        return outputs, results.times

    def _change(
        self,
        attempt: "_Attempt",
        shipment: Shipment,
        position: int,
        data: torch.UntypedStorage | None,
        *,
        first: bool,
    ) -> None:
        value = attempt.args[position]
        attempt.stay.repeatable = False
        sent = shipment.sent(position)
        if sent is None:
            self.never_bound |= {position}
            self._bindings = Bindings()
        if data is not None:
            new = laid_out(data, value if sent is None else sent.value)
            with torch.no_grad():
                value.copy_(new)
        elif not shipment.has_changed(value):  # through another input over the same storage
            attempt.stay_changed(value, first=first)
        write_epochs.note_write(value)
        shipment.changed(position, value)

    def _forget(self, channel: DataChannel, peer: WorkerPeer, failure: RemoteFailure) -> None:
        peer.kept.forget(failure.facts.get("missing", []))
        channel.defined.discard(self.number)
        channel.bound.pop(self.number, None)


class _Attempt(NamedTuple):
    """A call on one channel of a worker."""

    args: Sequence[Any]
    bound: Bound
    channel: DataChannel
    lease: ModelLease
    rng: bytes | None
    stay: StayingOutputs

    @property
    def peer(self) -> WorkerPeer:
        return self.lease.peer

    def note_kept(self, output: torch.Tensor, part: OutputPart, key: int) -> bool:
        """Record which content the worker keeps, if it keeps this output; whether both have it."""
        stays = part.offset == STAYS
        if not stays and not (key and part.kept):
            return False
        mark = write_epochs.mark_storage(write_epochs.storage_of(output), 0 if stays else key)
        self.peer.kept.result(mark.key, (mark.epoch, write_epochs.version_of(output)))
        if not stays:  # else its `AbsentBytes` says when nobody needs it
            mark.held_by(self.peer)
        return not stays

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
