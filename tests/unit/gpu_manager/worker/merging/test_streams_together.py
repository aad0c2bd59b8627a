"""Steps of several texts, each with a cache of its own in the worker, run as one."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_manager.worker.merging.merged_calls import MergedCalls, Merging
from gpu_manager.worker.orders import Singly
from gpu_manager.worker.program.inputs import KeptStorages
from tests.kit.worlds.caller import CallFailed, LocalWorker, program, step
from tests.unit.gpu_manager.worker.merging.crowd import Crowd, Sent, merging_pays
from torch_shim.wire.programs import Program, Ref
from torch_shim.wire.protocol import FailureKind

F = "t:torch.nn.functional."
WORDS, WIDTH, LONGEST, STREAMS = 10, 4, 32, 6
TABLE, OUT = torch.randn(WORDS, WIDTH), torch.randn(WORDS, WIDTH)
CACHE_KEY = 50

# A token, a cache, the cache's length, and two weights: the cache grows.
GROWS = program(
    step(F + "embedding", Ref(0), Ref(3)),
    step("m:unsqueeze", Ref(5), 0),
    step("t:torch.cat", [Ref(1), Ref(6)], 1),
    step(F + "scaled_dot_product_attention", Ref(6), Ref(7), Ref(7)),
    step("o:add", Ref(2), 1),
    step("o:truediv", Ref(8), Ref(9)),
    step(F + "linear", Ref(10), Ref(4)),
    inputs=5,
    output=[Ref(7), Ref(11)],
)
# A token, a cache, the place in it, and two weights: cache and place are written in place.
WRITES = program(
    step(F + "embedding", Ref(0), Ref(3)),
    step("m:unsqueeze", Ref(5), 0),
    step("m:index_copy_", Ref(1), 1, Ref(2), Ref(6)),
    step("m:add_", Ref(2), 1),
    step(F + "scaled_dot_product_attention", Ref(6), Ref(1), Ref(1)),
    step(F + "linear", Ref(9), Ref(4)),
    inputs=5,
    output=[Ref(10)],
)


class Growing:
    """A text whose cache grows, beside what torch alone makes of it."""

    program = GROWS

    def __init__(self, length: int) -> None:
        self.cache = torch.randn(1, length, WIDTH)
        self._key = CACHE_KEY
        self._is_new = True

    def sent(self, token: int) -> Sent:
        length = self.cache.shape[1]
        self._next = self._key + 10
        known: Any = self.cache
        if not self._is_new:
            known = [
                [1, self._key, 0],
                "float32",
                [1, length, WIDTH],
                [length * WIDTH, WIDTH, 1],
                0,
            ]
        stays = [self._next, 1, {1: 1 << 20}, []]
        more: dict[str, Any] = {"options": [None, None, [], None, "", None, stays]}
        if self._is_new:
            more["keys"] = [0, self._key]
        return Sent((torch.tensor([token]), known, length), more)

    def check(self, token: int, found: Sequence[Any]) -> None:
        x = TABLE[token].view(1, 1, WIDTH)
        length = self.cache.shape[1]
        self.cache = torch.cat([self.cache, x], 1)
        seen = scaled_dot_product_attention(x, self.cache, self.cache) / (length + 1)
        torch.testing.assert_close(found[1], seen @ OUT.T)
        self._key, self._is_new = self._next, False


class Written:
    """A text whose cache is written in place."""

    program = WRITES

    def __init__(self, length: int) -> None:
        self.cache = torch.zeros(1, LONGEST, WIDTH)
        self.cache[:, :length] = torch.randn(1, length, WIDTH)
        self.place, self._epoch = length, 0

    def sent(self, token: int) -> Sent:
        known: Any = self.cache.clone()
        if self._epoch:
            shape, strides = [1, LONGEST, WIDTH], [LONGEST * WIDTH, WIDTH, 1]
            known = [[1, CACHE_KEY, self._epoch], "float32", shape, strides, 0]
        more: dict[str, Any] = {
            "options": [None, None, [], None, "", None, [9000, 1, {0: 999}, []]]
        }
        if not self._epoch:
            more["keys"] = [0, CACHE_KEY]
        return Sent((torch.tensor([token]), known, torch.tensor([self.place])), more)

    def check(self, token: int, found: Sequence[Any]) -> None:
        x = TABLE[token].view(1, 1, WIDTH)
        self.cache[:, self.place] = x[0]
        seen = scaled_dot_product_attention(x, self.cache, self.cache)
        torch.testing.assert_close(found[0], seen @ OUT.T)
        self.place, self._epoch = self.place + 1, self._epoch + 1


Text = Growing | Written
both = pytest.mark.parametrize("kind", [Growing, Written])


class Writers:
    """Texts that are written beside each other, by callers of one worker."""

    def __init__(self, kind: type[Text], crowd: Crowd) -> None:
        self.kind, self.crowd = kind, crowd
        self.texts: list[Text] = [kind(2 + number) for number in range(len(crowd.callers))]
        crowd.bind(kind.program, [TABLE, OUT], behind=3)

    def step(self, tokens: Sequence[int | None]) -> dict[int, CallFailed]:
        """One step of each text that has a token; the failures, by text."""
        sent = [
            None if token is None else text.sent(token)
            for text, token in zip(self.texts, tokens, strict=True)
        ]
        writing = [number for number, token in enumerate(tokens) if token is not None]
        outcomes = self.crowd.call(self.kind.program, sent)
        failed = {}
        for number, outcome in zip(writing, outcomes, strict=True):
            token = tokens[number]
            assert token is not None
            if isinstance(outcome, CallFailed):
                failed[number] = outcome
            else:
                self.texts[number].check(token, outcome)
        return failed

    def learn(self) -> None:
        """Step until such groups are compared and measured."""
        for number in range(4):
            assert not self.step([(number + each) % WORDS for each in range(len(self.texts))])

    @property
    def groups(self) -> tuple[int, int]:
        counts = self.crowd.worker.part(MergedCalls).counts
        return counts.groups, counts.calls

    @property
    def singly(self) -> dict[Singly, int]:
        return dict(+self.crowd.worker.part(MergedCalls).counts.singly)


def paying_worker(*weights: torch.Tensor, **more: Any) -> LocalWorker:
    """A worker with whom running as one always pays."""
    return merging_pays(LocalWorker(*(weights or (TABLE, OUT)), features=[Merging], **more))


@both
def test_steps_of_texts_of_all_lengths_run_as_one_while_texts_begin_and_end(
    kind: type[Text],
) -> None:
    chance = random.Random(7)
    worker = paying_worker()
    with Crowd(worker, STREAMS) as crowd:
        writers = Writers(kind, crowd)
        for _ in range(25):
            writing = chance.sample(range(STREAMS), chance.randint(2, STREAMS))
            for number in writing:
                if chance.random() < 0.1:  # another text begins in its place
                    writers.texts[number] = kind(chance.randint(1, 5))
            tokens = [chance.randrange(WORDS) if n in writing else None for n in range(STREAMS)]
            assert not writers.step(tokens)
        groups, calls = writers.groups
        assert groups > 5
        assert calls >= 2 * groups
        assert set(writers.singly) <= {Singly.UNKNOWN, Singly.LEFT_OVER}


@both
def test_a_poisoned_step_fails_alone_and_the_other_texts_go_on(kind: type[Text]) -> None:
    worker = paying_worker()
    with Crowd(worker, STREAMS) as crowd:
        writers = Writers(kind, crowd)
        writers.learn()
        failed = writers.step([1, 2, WORDS + 5, 3, 4, 5])
        assert set(failed) == {2}
        assert writers.singly[Singly.FAILED] == STREAMS
        before = writers.groups
        writers.texts[2] = kind(3)
        assert not writers.step([5, 4, 3, 2, 1, 0])
        assert writers.groups == (before[0] + 1, before[1] + STREAMS)


def test_what_was_written_before_a_group_failed_is_taken_back() -> None:
    worker = paying_worker()
    with Crowd(worker, STREAMS) as crowd:
        writers = Writers(Written, crowd)
        writers.learn()
        last = writers.texts[-1]
        assert isinstance(last, Written)
        last.place = LONGEST  # refused when the others' caches are written to
        failed = writers.step([1, 2, 3, 4, 5, 6])
        assert set(failed) == {STREAMS - 1}
        assert writers.singly[Singly.FAILED] == STREAMS
        writers.texts[-1] = Written(2)
        assert not writers.step([6, 5, 4, 3, 2, 1])


@both
def test_other_texts_go_on_when_a_client_leaves_in_the_midst_of_a_step(kind: type[Text]) -> None:
    worker = paying_worker()
    with Crowd(worker, STREAMS) as crowd:
        writers = Writers(kind, crowd)
        writers.learn()
        before, texts = writers.groups, writers.texts
        sent = [text.sent(number) for number, text in enumerate(texts)]
        calls = crowd.begin(kind.program, sent, lambda: crowd.callers[3].wire.socket.shutdown(2))
        assert calls[3].exception() is not None
        for number, (text, call) in enumerate(zip(texts, calls, strict=True)):
            if number != 3:
                text.check(number, call.result().outputs)
        assert writers.groups[1] == before[1] + STREAMS
        assert not writers.step([1, 2, 3, None, 5, 6])
    worker.join()


@both
def test_steps_never_run_as_one_when_that_group_would_take_too_much_memory(
    kind: type[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = paying_worker()
    with Crowd(worker, STREAMS) as crowd:
        writers = Writers(kind, crowd)
        writers.learn()
        before, attempt = writers.groups, worker.device.run

        def short(work: Any, *, measure: bool) -> Any:
            found, _ = attempt(work, measure=measure)
            return found, 1 << 50 if measure else 0

        monkeypatch.setattr(worker.device, "run", short)
        worker.executor.memory._needs.clear()  # noqa: SLF001 - each shape is measured again
        assert not writers.step([1, 2, 3, 4, 5, 6])
        after = writers.groups
        assert after == (before[0] + 1, before[1] + STREAMS)
        monkeypatch.undo()
        assert not writers.step([1, 2, 3, 4, 5, 6])
        assert writers.groups[1] < after[1] + STREAMS  # smaller groups may fit


def caller_kept(worker: LocalWorker, number: int) -> KeptStorages:
    """What a caller's session keeps."""
    kept = worker.executor.sessions.open(f"s{number}")
    worker.executor.sessions.close(f"s{number}")
    return kept


def test_two_calls_that_write_to_one_cache_never_run_as_one() -> None:
    worker = paying_worker()
    with Crowd(worker, 2) as crowd:
        writers = Writers(Written, crowd)
        writers.learn()
        for _ in range(2):
            assert not writers.step([1, 2])
        before = writers.groups
        assert before[0] > 0
        sent = writers.texts[0].sent(3)
        kept = [caller_kept(worker, number) for number in range(2)]
        kept[1].keep_sole(kept[0].sole()[0])  # one cache, as two threads of a function have it
        outcomes = crowd.call(WRITES, [sent, sent])
        writers.texts[0].check(3, outcomes[0])
        assert isinstance(outcomes[1], CallFailed)
        assert outcomes[1].failure == FailureKind.MISSING
        assert writers.groups == before


# A prompt of two tokens, and two weights: the first step of a text makes its cache and fills it.
BEGINS = program(
    step(F + "embedding", Ref(0), Ref(1)),
    step("t:torch.zeros", 1, LONGEST, WIDTH),
    step("m:view", Ref(4), 1, LONGEST, WIDTH),
    step("t:torch.arange", 2),
    step("m:index_copy_", Ref(5), 1, Ref(6), Ref(3)),
    step(F + "scaled_dot_product_attention", Ref(3), Ref(5), Ref(5)),
    step(F + "linear", Ref(8), Ref(2)),
    inputs=3,
    output=[Ref(4), Ref(9)],
)


def test_first_steps_that_make_their_caches_run_as_one_and_each_has_its_own() -> None:
    worker = paying_worker()
    with Crowd(worker, 4) as crowd:
        crowd.bind(BEGINS, [TABLE, OUT])
        for number in range(6):
            prompts = [torch.tensor([[number, each]]) for each in range(4)]
            found = crowd.call(BEGINS, prompts)
            for prompt, (cache, out) in zip(prompts, found, strict=True):
                x = TABLE[prompt]
                expected = torch.zeros(1, LONGEST, WIDTH)
                expected[:, :2] = x
                torch.testing.assert_close(cache, expected)
                seen = scaled_dot_product_attention(x, expected, expected)
                torch.testing.assert_close(out, seen @ OUT.T)
        assert worker.part(MergedCalls).counts.calls >= 3 * 4
        assert set(+worker.part(MergedCalls).counts.singly) <= {Singly.UNKNOWN}


def test_programs_whose_weights_meet_other_shapes_run_as_one_with_equal_shapes_only() -> None:
    # A weight is applied to the whole of what differs in length, all the way.
    what: Program = program(
        step(F + "linear", Ref(0), Ref(1)),
        *(step(F + "linear", Ref(2 + number), Ref(1)) for number in range(80)),
        output=[Ref(82)],
        inputs=2,
    )
    weight = torch.eye(WIDTH)
    worker = paying_worker(weight)
    with Crowd(worker, 4) as crowd:
        crowd.bind(what, [weight])
        for lengths, merges in [((1, 2, 3, 4), False), ((5, 5, 5, 5), True)]:
            before = worker.part(MergedCalls).counts.groups
            for _ in range(4):
                xs = [torch.randn(length, WIDTH) for length in lengths]
                sent = [Sent((x,), {"keys": [7]}) for x in xs]
                for x, (y,) in zip(xs, crowd.call(what, sent), strict=True):
                    torch.testing.assert_close(y, x)
            assert (worker.part(MergedCalls).counts.groups > before) is merges
        assert worker.part(MergedCalls).counts.singly[Singly.SHAPES] == 3
