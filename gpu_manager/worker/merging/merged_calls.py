"""Answers the call that has the turn, and others in line with it where running as one pays.

It stands in for the executor, which has each call run singly.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from gpu_manager.call_errors import CallRefused, ContextLost, OutOfMemory
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, Computing
from gpu_manager.worker.executor import InTurn, RunCall, refuse_reshaped
from gpu_manager.worker.features import ModelFeature, ModelSpace, TellManager, WorkerFeature
from gpu_manager.worker.merging import merged_run
from gpu_manager.worker.merging.call_line import CallInLine, CallLine, Likenesses, why_singly
from gpu_manager.worker.merging.group_runs import Found, GroupRuns
from gpu_manager.worker.merging.merged_run import attention_rules, writes_to_shared
from gpu_manager.worker.merging.records import (
    PAUSES,
    USUAL_MOST,
    CannotMerge,
    MergeCounts,
    MergeRecord,
    MergeRecords,
    MergeSums,
    Plan,
)
from gpu_manager.worker.orders import LoadImage, Singly
from gpu_manager.worker.program.inputs import Inputs, TensorInput
from gpu_manager.worker.program.recorded_runs import ProgramRun
from gpu_manager.worker.program.tensor_specs import versions_of
from torch_shim.wire.protocol import FailureKind

SMALLEST = 2  # calls in a group
_MOST_LINES = 64  # of calls, by slots, before those are forgotten in which nobody stands


class Merging(WorkerFeature):
    """Calls of one model that wait for the same turn run as one, where that pays."""

    def begin(self, model: ModelSpace) -> "MergedCalls":
        return MergedCalls(model, self.worker.tell)


class _Member(NamedTuple):
    """One call of a group, with what its program gets."""

    waiting: CallInLine
    inputs: Inputs
    times: list[float]


class _Group(NamedTuple):
    """Calls that are like each other, and what is known of such."""

    members: list[_Member]
    record: MergeRecord

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def inputs(self) -> list[Inputs]:
        return [member.inputs for member in self.members]


class MergedCalls(ModelFeature):
    """Runs the calls of one model, for whoever has its turn."""

    def __init__(self, model: ModelSpace, tell: TellManager) -> None:
        self.counts = MergeCounts()
        self.most = USUAL_MOST  # calls in a group; below 2: calls are never merged
        self.pace = ComparisonPace()
        self.records = MergeRecords()
        self._executor = model.executor
        self._sums = MergeSums(model.number, self.counts, tell)
        self._likenesses = Likenesses()
        self._lines: dict[tuple[int, ...], CallLine] = {}  # by the slots of their leases
        self._runs = GroupRuns()
        attention_rules()

    def stand_in(self) -> RunCall:
        return self.run

    def loaded(self, order: LoadImage) -> None:
        self.most = order.merged or USUAL_MOST

    def report(self, *, at_once: bool = False) -> None:
        self._sums.report(at_once=at_once)

    def run(self, asked: ChannelCall, in_turn: InTurn) -> CallAnswer:
        """Answer a call when it has the turn of its line, or let another one's turn answer it."""
        waiting = CallInLine(asked)
        line = self.line(asked.terms.slots)
        if not line.stand(waiting):
            return waiting.outcome()
        try:
            return in_turn(asked, self.answer, waiting, line)
        finally:
            line.leave()

    def line(self, slots: tuple[int, ...] = ()) -> CallLine:
        """The line of calls whose leases have these slots, or the whole GPU."""
        line = self._lines.get(slots)
        if line is None:
            if len(self._lines) > _MOST_LINES:
                self._lines = {known: each for known, each in self._lines.items() if len(each)}
            line = self._lines.setdefault(slots, CallLine(self._likenesses.of))
        return line

    def answer(self, first: CallInLine, line: CallLine) -> CallAnswer:
        """Answer a call that has the line's turn, and deliver the answer; perhaps others, too."""
        if not line.any_waiting():
            return self._executor.run(first.asked, first.asked_s)
        plan = self._plan(first, line)
        if not isinstance(plan, Plan):
            like = first.likeness is not None
            if plan is not None and not (like and self._record(first).pays):
                line.note_single(first)
            return self._alone(first, plan)
        others, again = line.take_like(first, plan.size - 1), list[CallInLine]()
        try:
            again = self._answer_all([first, *others], plan)
        finally:
            left = [call for call in others if not call.is_done]
            for call in left:
                call.stands_alone = call not in again
            line.put_back(left)
        if first.is_done and not plan.compares:
            line.note_group(first)
        return first.outcome() if first.is_done else self._alone(first, None)

    def _record(self, call: CallInLine) -> MergeRecord:
        return self.records.of(call.likeness)

    def _plan(self, first: CallInLine, line: CallLine) -> Plan | Singly | None:
        """The group to make, or why there is none; None where nothing like the call waits."""
        there = 1 + line.count_like(first)
        if first.likeness is None:
            return why_singly(first.asked)
        never = self.counts.why_never(first.asked.program.digest)
        if there == 1 or never is not None:
            return never
        most = min(self.most, first.asked.terms.batch or self.most)
        if most < SMALLEST:
            return Singly.OFF
        record = self._record(first)
        return record.plan(min(there, most), may_compare=self.pace.is_due(record))

    def _alone(self, call: CallInLine, why: Singly | None) -> CallAnswer:
        """Run it singly, and learn from that what merged runs have to be like."""
        if why is not None:
            self.counts.singly[why] += 1
        if call.likeness is None:
            return self._executor.run(call.asked, call.asked_s)
        record = self._record(call)

        def look(inputs: Inputs, run: ProgramRun, wrote: bool) -> None:  # noqa: FBT001 - a callback
            if record.outputs is None:
                self._watch(call, record, inputs, run, wrote=wrote)

        answer = self._executor.run(call.asked, call.asked_s, look)
        record.note_single(answer.times[2])
        return answer

    def _watch(
        self, call: CallInLine, record: MergeRecord, inputs: Inputs, run: ProgramRun, *, wrote: bool
    ) -> None:
        """Note what a single call of this kind gives, or that such calls are never merged."""
        program = call.asked.program
        record.outputs = merged_run.layouts_of(run.outputs)
        written = {entry.position for entry in inputs.changed()}
        sent = {entry.position for entry in inputs.sent if entry.held.image is None}
        returned = merged_run.inputs_in_outputs(inputs, run, program.constants)
        if not written <= sent or (wrote and not written):
            self.counts.forbid(program.digest, Singly.WRITES)
        elif returned is None:
            self.counts.forbid(program.digest, Singly.ALIASES)
        elif not sent:
            self.counts.forbid(program.digest, Singly.NOTHING_SENT)
        elif not self._runs.note_own(program.digest, written, returned):
            self.counts.forbid(program.digest, Singly.WRITES)

    # -- groups ---------------------------------------------------------------------------------

    def _answer_all(self, calls: list[CallInLine], plan: Plan) -> list[CallInLine]:
        """Answer calls as one; give those that wait for another group.

        All others that are not done afterwards have to run singly.
        """
        record = self._record(calls[0])
        try:
            members = [member for call in calls if (member := self._read(call)) is not None]
        except OutOfMemory:
            self._short(record, len(calls))
            return []
        group = _Group(self._with_tensors_of_their_own(members), record)
        if group.size < SMALLEST:
            return []
        program = calls[0].asked.program
        if not plan.compares and self._runs.is_ready(program, group.inputs):
            self._merge(group)
            return []
        with self.pace.comparing(record):
            return self._compare(group)

    def _read(self, call: CallInLine) -> _Member | None:
        """Admit a call and read its inputs; None where it is refused, and thereby done."""
        begun_s = time.perf_counter()
        try:
            self._executor.admit(call.asked)
            inputs = self._executor.inputs(call.asked)
        except CallRefused as refused:
            self._done(call, refused)
            return None
        times = [begun_s - call.asked_s, time.perf_counter() - begun_s, 0.0, 0.0]
        return _Member(call, inputs, times)

    def _with_tensors_of_their_own(self, members: list[_Member]) -> list[_Member]:
        """The members without those that write to what another one writes to: they run alone."""
        independent, taken = [], set[int]()
        for member in members:
            written = self._runs.written(member.waiting.asked.program.digest)
            held = {id(entry.held) for entry in member.inputs.sent if entry.position in written}
            if taken.isdisjoint(held):
                independent.append(member)
                taken |= held
        return independent

    def _merge(self, group: _Group) -> None:
        begun_s = time.perf_counter()
        try:
            found = self._run(group, self._runs.run)
        except REFUSALS as error:
            self._note_refusal(group, error)
            return
        if found is None:
            return
        merged_s = self._executor.emulated_s(time.perf_counter() - begun_s)
        group.record.note_merged(group.size, merged_s)
        self.counts.groups += 1
        self.counts.calls += group.size
        share_s = merged_s / group.size
        for member, outputs in zip(group.members, found.outputs, strict=True):
            member.times[0] += merged_s - share_s
            member.times[2] = share_s
            self._deliver(member, outputs, group.size, lasting=found.lasting)

    def _deliver(
        self, member: _Member, outputs: tuple[Any, ...], together: int, *, lasting: bool
    ) -> None:
        asked, inputs = member.waiting.asked, member.inputs
        # What lies beside the results of others is copied where it is kept.
        run = ProgramRun(outputs, {}, lasting=lasting)
        changed: list[TensorInput] | None = None
        outcome: CallAnswer | BaseException
        try:
            written = inputs.changed()
            refuse_reshaped(written)
            outcome = self._executor.delivered(
                asked, inputs, run, written, member.times, together=together
            )
            changed = written
        except BaseException as error:  # noqa: BLE001 - it is the call's own, and raised in its thread
            outcome = error
        self._executor.settle_all(asked, inputs, changed)
        self._done(member.waiting, outcome)

    def _compare(self, group: _Group) -> list[CallInLine]:
        """Run the calls as one, and some singly, which that answers; give the others."""
        digest = group.members[0].waiting.asked.program.digest
        try:
            found = self._run(group, self._runs.try_out)
        except REFUSALS as error:
            self._note_refusal(group, error, first=True)
            return []
        if found is None:
            return []
        merged_s = max(found.spent_s, self._executor.least_s)
        if found.loops:
            self.counts.forbid(digest, Singly.NO_RULE)
            self._singly(Singly.NO_RULE, group)
            return []
        checked = checked_places(group.size)
        self.counts.compared += len(checked)
        answers = []
        for place in checked:
            member = group.members[place]
            answers.append(self._compared(member, found.outputs[place], found.copies[place]))
            lost = member.waiting.result
            if isinstance(lost, ContextLost):  # the others' calls are not to blame
                raise lost if member is group.members[0] else _blameless(lost)
        if any(equal is False for _, equal in answers):
            self.counts.forbid(digest, Singly.DIFFERS)
        elif all(equal for _, equal in answers):
            singles_s = sum(spent for spent, _ in answers) * group.size / len(checked)
            group.record.note_compared(group.size, merged_s, singles_s)
        else:
            group.record.note_failed(group.size)
        return [member.waiting for member in group.members]

    def _compared(
        self, member: _Member, merged: Sequence[Any], copies: dict[int, torch.Tensor]
    ) -> tuple[float, bool | None]:
        """Answer a call singly: how long it ran, and if it gave the same; None where it failed."""
        waiting, equal = member.waiting, None

        def look(inputs: Inputs, run: ProgramRun, wrote: bool) -> None:  # noqa: FBT001 - a callback
            nonlocal equal
            written = {entry.position for entry in inputs.changed()}
            single = [*run.outputs, *(inputs.values[position] for position in copies)]
            known = written <= copies.keys() and bool(written) == wrote
            equal = known and self._is_equal(single, [*merged, *copies.values()])

        begun_s = time.perf_counter()
        member.times[0] = begun_s - waiting.asked_s - member.times[1]
        try:
            answer = self._executor.answer(waiting.asked, member.inputs, member.times, look)
        except BaseException as error:  # noqa: BLE001 - as in `_deliver`
            self._done(waiting, error)
            return 0.0, None
        self._done(waiting, answer)
        return answer.times[2], equal

    def _is_equal(self, single: Sequence[Any], merged: Sequence[Any]) -> bool | None:
        """Whether both gave the same; None where there is no memory to compare them."""
        try:
            found, _ = self._executor.device.run(
                lambda: merged_run.differs(single, merged), measure=False
            )
        except OutOfMemory:
            return None
        return not found

    def _run(self, group: _Group, how: Callable[..., Found]) -> Found | None:
        """What each call gets; None where the group cannot run and need not be tried again soon."""
        call = group.members[0].waiting.asked
        program, outputs = call.program, group.record.outputs
        assert outputs is not None, "a program is watched before it is merged"
        key = self._runs.key_of(program.digest, group.inputs)
        shapes = ("merged", how.__name__, program.digest, group.size, key)
        before = versions_of(program.constants)
        memory, expected = self._executor.memory, set[int]()

        def work() -> Found:
            with Computing(self._executor.device.device, call.mode):
                return how(program, group.inputs, outputs)

        try:
            found, need_bytes = memory.attempt(shapes, work)
            expected = self._runs.written(program.digest)
        except OutOfMemory:
            self._short(group.record, group.size)
            self._singly(Singly.MEMORY, group)
            return None
        except ContextLost as lost:  # nobody knows by which of the calls
            raise _blameless(lost) from lost
        finally:
            wrote = versions_of(program.constants) != before
            self._executor.tidy(program, before)
            wrote |= self._undo_writes(group, expected)
        if wrote:
            self.counts.forbid(program.digest, Singly.WRITES)
            return None
        if need_bytes > memory.limit_bytes:
            self._short(group.record, group.size)
        return found

    def _undo_writes(self, group: _Group, expected: set[int]) -> bool:
        """Undo what a run wrote to other inputs than it should have; whether it did."""
        wrote = False
        for member in group.members:
            changed = member.inputs.changed()
            if any(entry.position not in expected for entry in changed):
                wrote = True
                self._executor.settle(changed, member.waiting.asked, finished=False)
                detail = "inputs were written to by a merged run; send them again"
                self._done(
                    member.waiting, CallRefused(FailureKind.MISSING, detail, {"missing": []})
                )
        return wrote

    def _note_refusal(self, group: _Group, error: Exception, *, first: bool = False) -> None:
        """`first`: the group never ran before."""
        program = group.members[0].waiting.asked.program
        why = reason_of(error)
        if not first and not (isinstance(error, CannotMerge) and why is not Singly.DIFFERS):
            why = Singly.FAILED
        if why is Singly.SHAPES and program not in self._likenesses.equal_shapes:
            self._likenesses.equal_shapes.add(program)
        elif why is Singly.FAILED:  # perhaps for one of the calls alone
            group.record.note_failed(group.size)
        else:
            self.counts.forbid(program.digest, why)
        self._singly(why, group)

    def _short(self, record: MergeRecord, size: int) -> None:
        record.note_short(size)
        self._executor.device.release()

    def _singly(self, why: Singly, group: _Group) -> None:
        self.counts.singly[why] += group.size

    def _done(self, call: CallInLine, outcome: CallAnswer | BaseException) -> None:
        call.result = outcome
        if not call.asked.terms.slots:  # else when the slots' emulated time is over
            call.wake()


def _blameless(lost: ContextLost) -> ContextLost:
    """What calls are told whose worker ends: they are repeated in another one."""
    return ContextLost(str(lost), of_program=False)


# When groups are compared with single calls, and which calls of a group: all others wait for it.
#
# Each size is compared, and each length of a text's first step has sizes of its own. One after the
# other, those comparisons held up every stream of a model for seconds.

_MOST_CHECKED = 4  # calls of a group


class ComparisonPace:
    """Says when the next comparison may begin; for whoever has the model's turn.

    All have a quarter of the time at most. Those of one kind of calls rest as their record says.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.pauses = PAUSES
        self._clock = clock
        self._from_s = 0.0

    def is_due(self, record: MergeRecord) -> bool:
        return self._clock() >= max(self._from_s, record.rests_till_s)

    @contextmanager
    def comparing(self, record: MergeRecord) -> Iterator[None]:
        begun_s = self._clock()
        try:
            yield
        finally:
            end_s = self._clock()
            self._from_s = end_s + self.pauses * (end_s - begun_s)
            record.rests_till_s = end_s + record.pauses * (end_s - begun_s)


def checked_places(size: int) -> list[int]:
    """The places of the calls that run both ways, of so many: first, last, and some between."""
    if size <= _MOST_CHECKED:
        return list(range(size))
    return [place * (size - 1) // (_MOST_CHECKED - 1) for place in range(_MOST_CHECKED)]


# A group that failed so runs singly.
REFUSALS = (CallRefused, CannotMerge)

_OF_VALUES = ("data-dependent control flow", ".item()", "dynamic shape")
_OF_RULES = ("Batching rule not implemented", "batching rule")
_OF_CHANCE = "randomness"


def reason_of(error: Exception) -> Singly:
    if isinstance(error, CannotMerge):
        return error.why
    text = str(error)
    if any(words in text for words in _OF_VALUES):
        return Singly.VALUES
    if _OF_CHANCE in text:
        return Singly.RANDOM
    if writes_to_shared(error):
        return Singly.WRITES
    return Singly.NO_RULE if any(words in text for words in _OF_RULES) else Singly.FAILED
