"""A queue in lanes answers like one sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Bundle, Pending, RequestQueue
from scheduler.model.values import Request, RequestId
from tests.kit.without_collector import without_collector

CLASSES = 3
BUNDLES = 5

# add (lane), remove (which), put back (which of those removed), move a lane to another size class
_operations = st.lists(
    st.tuples(st.sampled_from(("add", "add", "remove", "back", "class")), st.integers(0, 40)),
    max_size=60,
)


def bundle(number: int) -> Bundle:
    made = Bundle((ModelId(f"m{number}"),))
    made.size_class = number % CLASSES
    return made


def pending(number: int, lane: Bundle) -> Pending:
    return Pending(Request(RequestId(f"r{number}"), "f", lane.models), lane, number, 0.0)


class Pair:
    """The queue and the sorted list that it should equal."""

    def __init__(self) -> None:
        self.queue = RequestQueue(CLASSES)
        self.expected: list[Pending] = []
        self.removed: list[Pending] = []
        self.bundles = [bundle(number) for number in range(BUNDLES)]
        self.made = 0

    def add(self, number: int) -> None:
        self.made += 1
        self._enter(pending(self.made, self.bundles[number % BUNDLES]))

    def _enter(self, entered: Pending) -> None:
        self.queue.add(entered, entered.seq, 0.0)
        self.expected = sorted([*self.expected, entered], key=lambda each: each.seq)

    def remove(self, number: int) -> None:
        if self.expected:
            gone = self.expected.pop(number % len(self.expected))
            self.queue.remove(gone, 0.0)
            self.removed.append(gone)

    def back(self, number: int) -> None:
        if self.removed:
            self._enter(self.removed.pop(number % len(self.removed)))

    def reclass(self, number: int) -> None:
        changed = self.bundles[number % BUNDLES]
        changed.size_class = (changed.size_class + 1) % CLASSES
        self.queue.regroup(CLASSES)

    def check(self) -> None:
        assert list(self.queue) == self.expected
        assert len(self.queue) == self.queue.count == len(self.expected)
        for size_class in range(CLASSES):
            fitting = [each for each in self.expected if each.bundle.size_class <= size_class]
            assert self.queue.first(size_class) is (fitting[0] if fitting else None)
            heads = {each.bundle: each for each in reversed(fitting)}
            assert self.queue.first_lanes(size_class) == sorted(
                heads.values(), key=lambda each: each.seq
            )
        for each in self.bundles:
            mine = [waiting for waiting in self.expected if waiting.bundle is each]
            lane = self.queue.lanes.get(each)
            assert (list(lane) if lane is not None else []) == mine
            assert (lane.waiting if lane is not None else 0) == len(mine)


@given(operations=_operations)
def test_queue_is_a_sorted_list_when_requests_come_and_go(
    operations: list[tuple[str, int]],
) -> None:
    pair = Pair()
    acts = {"add": pair.add, "remove": pair.remove, "back": pair.back, "class": pair.reclass}
    for name, number in operations:
        acts[name](number)
        pair.check()


def test_queue_has_no_first_when_it_is_empty() -> None:
    queue = RequestQueue(CLASSES)
    assert queue.first(CLASSES - 1) is None
    assert list(queue) == []


def test_queue_counts_the_time_in_which_somebody_waits() -> None:
    queue, waiting = RequestQueue(), [pending(number, bundle(0)) for number in range(2)]
    queue.add(waiting[0], 0, 1.0)
    queue.add(waiting[1], 1, 2.0)
    queue.remove(waiting[0], 2.5)
    queue.remove(waiting[1], 3.0)
    queue.add(waiting[0], 0, 5.0)
    assert [queue.contended_s(at_s) for at_s in (5.0, 5.5, 8.0)] == [2.0, 2.5, 5.0]
    queue.remove(waiting[0], 8.0)
    assert queue.contended_s(11.0) == 5.0


def test_lanes_that_are_over_are_freed_without_the_collector() -> None:
    queue = RequestQueue()

    def wait_and_leave(number: int) -> None:
        entered = pending(number, bundle(number))
        queue.add(entered, number, 0.0)
        queue.remove(entered, 0.0)

    with without_collector() as garbage:
        for number in range(2000):
            wait_and_leave(number)
        assert garbage() < 100
