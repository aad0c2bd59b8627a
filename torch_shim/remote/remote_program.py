"""Runs one graph call on a worker: binds the weights, sends the inputs, reads the results."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_shim.errors import ManagerUnreachable, RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.presented_lease import SessionLease
from torch_shim.process_report import report
from torch_shim.remote.transfer import IMAGE, NAME_OF, Results, Shipment, alias, view
from torch_shim.tensors import write_epochs
from torch_shim.weights.model_weights import ModelImage
from torch_shim.wire.arena import tensor_over
from torch_shim.wire.arithmetic import Arithmetic, arithmetic_in_force
from torch_shim.wire.call_timings import CallTiming
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.manager_session import ModelLease
from torch_shim.wire.programs import Program, digest_of
from torch_shim.wire.protocol import FailureKind
from torch_shim.wire.worker_memory import WorkerStorages

# How often one call may resend what a worker has lost before the call fails.
MOST_RESENDS = 5
MOST_CRASHES = 2

# A worker keeps results of at least this size, so that they are not resent as inputs.
KEEP_RESULTS_FROM_BYTES = 16 << 10

_USUAL = Arithmetic()

_programs = itertools.count(1)
_bindings = itertools.count(1)


class Bound:
    """The inputs of a graph that are a model's weights; valid until one of them is written to."""

    def __init__(self, args: Sequence[Any], model: ModelImage, never: frozenset[int]) -> None:
        self.number = next(_bindings)
        self.model = model
        self.positions: list[int] = []
        self.tensors: dict[int, Any] = {}
        self._writes = write_epochs.writes
        marks = []
        for position, value in enumerate(args):
            described = None if position in never else self._describe(value)
            if described is not None:
                self.positions.append(position)
                self.tensors[position] = described
                marks.append(write_epochs.marked(value))
        self._values = [args[position] for position in self.positions]
        self._versions = list(map(write_epochs.version_of, self._values))
        self._marks = marks
        self._epochs = [mark.epoch for mark in marks]
        taken = set(self.positions)
        self.others = [position for position in range(len(args)) if position not in taken]

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether these arguments are the bound weights, and unchanged since binding."""
        values = [args[position] for position in self.positions]
        if not all(map(operator.is_, values, self._values)):
            return False
        if list(map(write_epochs.version_of, values)) != self._versions:
            return False
        if self._writes != write_epochs.writes:
            writes = write_epochs.writes
            marks = [write_epochs.marked(value) for value in values]
            if not all(map(operator.is_, marks, self._marks)):
                return False
            if [mark.epoch for mark in marks] != self._epochs:
                return False
            self._writes = writes
        return True

    def _describe(self, value: Any) -> list[Any] | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        mark = write_epochs.mark_of(value)
        place = (
            None
            if mark is None or mark.untracked
            else self.model.place_of(mark, write_epochs.version_of(value))
        )
        if place is None:
            return None
        source = [IMAGE, self.model.digest, place.offset, place.size_bytes]
        shape, strides = list(value.size()), list(value.stride())
        return [source, NAME_OF[value.dtype], shape, strides, value.storage_offset(), False]


class RemoteProgram:
    """A program that workers run, with measurements of its earlier calls."""

    def __init__(self, program: Program, operators: int) -> None:
        self.number = next(_programs)
        self.packed = program.pack()
        self.digest = digest_of(self.packed)
        self.random = program.random
        self.operators = operators
        self.never_bound: frozenset[int] = frozenset()
        self._result_bytes = 0
        self._worth_keeping: list[bool] = []
        self._bound: Bound | None = None

    def run(self, args: Sequence[Any], lease_for: Callable[[int], SessionLease]) -> list[Any]:
        """Return the outputs that a worker computes; raise RemoteFailure if no worker does.

        `lease_for` returns a lease for a batch size, and a new one when the former has ended.
        """
        with request_context.timed() as timing:
            return self._run(args, lease_for, timing)

    def _run(
        self,
        args: Sequence[Any],
        lease_for: Callable[[int], SessionLease],
        timing: CallTiming | None,
    ) -> list[Any]:
        batch = _batch(args)
        rng = torch.default_generator.get_state().numpy().tobytes() if self.random else None
        crashes = resends = 0
        while True:
            try:
                found = lease_for(batch)
                session, model, lease, _ = found
                channel = session.channel(lease, batch)
            except WireError as error:
                if isinstance(error, ManagerUnreachable) and not crashes:
                    raise
                crashes = self._crashed(crashes, error)
                continue
            if channel is None:
                lease.over = True
                continue
            answered = False
            found.begin_call()
            try:
                trace = timing.header if timing is not None and session.traces else None
                settings = arithmetic_to_send(taken=session.takes_arithmetic)
                more = [trace or "", settings] if settings else [trace] if trace else []
                outputs, times = self._once(args, model, channel, lease, rng, more)
                answered = True
                if timing is not None:
                    timing.answered(lease.number, model.digest, batch, times)
            except RemoteFailure as failure:
                if failure.failure == FailureKind.LEASE:
                    lease.over = True
                elif failure.failure == FailureKind.MISSING and resends < MOST_RESENDS:
                    resends += 1
                    self._forget(channel, lease.peer.kept, failure)
                else:
                    raise
            except WireError as error:
                session.mark_lost(lease)
                crashes = self._crashed(crashes, error)
            else:
                return outputs
            finally:
                session.give(lease, channel)
                found.end_call(answered=answered)

    def _crashed(self, crashes: int, error: WireError) -> int:
        """Count one more broken connection; a call has no side effects and may be repeated once."""
        report.add("repeated_calls", 1)
        if crashes + 1 >= MOST_CRASHES:
            message = f"connections broke {crashes + 1} times in this call ({error})"
            raise RemoteFailure(FailureKind.LOST, message, {}) from error
        return crashes + 1

    def _once(
        self,
        args: Sequence[Any],
        model: ModelImage,
        channel: DataChannel,
        lease: ModelLease,
        rng: bytes | None,
        more: list[Any],
    ) -> tuple[list[Any], list[float]]:
        kept = lease.peer.kept
        bound = self._binding(args, model)
        channel.define(self.number, self.digest, self.packed)
        channel.bind(self.number, bound.number, bound.tensors)
        unbound = [(position, args[position]) for position in bound.others]
        shipment = Shipment(unbound, len(args), kept)
        keys = [write_epochs.new_key() if keep else 0 for keep in self._worth_keeping]
        options = [_autocast(), rng, keys, _default_dtype(), *more]
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
        return self._read(frame, channel, shipment, args, kept, keys)

    def _binding(self, args: Sequence[Any], model: ModelImage) -> Bound:
        bound = self._bound
        if bound is None or bound.model is not model or not bound.holds(args):
            bound = self._bound = Bound(args, model, self.never_bound)
        return bound

    def _read(
        self,
        frame: Frame,
        channel: DataChannel,
        shipment: Shipment,
        args: Sequence[Any],
        kept: WorkerStorages,
        keys: list[int],
    ) -> tuple[list[Any], list[float]]:
        """Return the outputs and the worker's times."""
        results = Results(frame, channel)
        self._result_bytes = max(self._result_bytes, results.size_bytes)
        self._worth_keeping = [entry[1] >= KEEP_RESULTS_FROM_BYTES for entry in results.storages]
        owned = results.tensors()
        for position, data in results.changes():
            self._change(args[position], data, shipment, position)
        if results.rng is not None:
            state = torch.frombuffer(bytearray(results.rng), dtype=torch.uint8)
            torch.default_generator.set_state(state)
        outputs = []
        for described in results.views:
            if not isinstance(described, list):
                outputs.append(described)
            elif described[0] >= 0:
                number = described[0]
                output = view(owned[number], described)
                if number < len(keys) and keys[number] and results.storages[number][2]:
                    mark = write_epochs.mark_storage(owned[number], keys[number])
                    kept.result(mark.key, (mark.epoch, write_epochs.version_of(output)))
                outputs.append(output)
            else:
                position = -1 - described[0]
                outputs.append(alias(args[position], shipment.sent(position), described))
        report.graph_call(self.operators, shipment.size_bytes, results.size_bytes, results.times)
        return outputs, results.times

    def _change(
        self, value: torch.Tensor, data: torch.Tensor, shipment: Shipment, position: int
    ) -> None:
        """Apply the program's write to an input to this process's tensor."""
        sent = shipment.sent(position)
        if sent is None:
            self.never_bound |= {position}
            self._bound = None
        laid_out = value if sent is None else sent.value
        storage = write_epochs.storage_of(data)
        new = tensor_over(storage, value.dtype, 0, laid_out.size(), laid_out.stride())
        with torch.no_grad():
            value.copy_(new)
        write_epochs.note_write(value)
        shipment.changed(position, value)

    def _forget(self, channel: DataChannel, kept: WorkerStorages, failure: RemoteFailure) -> None:
        kept.forget(failure.facts.get("missing", []))
        channel.defined.discard(self.number)
        channel.bound.pop(self.number, None)


def _batch(args: Sequence[Any]) -> int:
    for value in args:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            return value.size(0) if value.dim() else 1
    return 1


def _autocast() -> list[Any] | None:
    if not torch.is_autocast_enabled("cuda"):
        return None
    return [NAME_OF[torch.get_autocast_dtype("cuda")], torch.is_autocast_cache_enabled()]


def arithmetic_to_send(*, taken: bool) -> list[Any] | None:
    """The settings to send with a call; RemoteFailure where no worker would compute so."""
    try:
        found = arithmetic_in_force()
    except RuntimeError as error:  # torch says so where both of its interfaces are used
        raise RemoteFailure(FailureKind.OPERATOR, f"tf32: {error}", {}) from error
    if found == _USUAL:
        return None
    if not taken:
        detail = "this node's workers take no settings of tf32, cuDNN or determinism"
        raise RemoteFailure(FailureKind.OPERATOR, detail, {})
    return list(found)


def _default_dtype() -> str | None:
    dtype = torch.get_default_dtype()
    return None if dtype is torch.float32 else NAME_OF[dtype]
