"""Whose block is next: ranks, turns of owners, order in a queue, nobody forgotten, no byte lost."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from gpu_manager.devices.loads import TransferRank
from gpu_manager.worker.transfers.schedule import (
    PATIENCE,
    QueuedTransfer,
    TransferSchedule,
)

BLOCK = 100
CALL, AWAITED, BACKGROUND = TransferRank
# A transfer: its owner, rank and size, and the number of blocks that pass before it is queued.
Arrivals = list[tuple[str, TransferRank, int, int]]
ARRIVALS: st.SearchStrategy[Arrivals] = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(list(TransferRank)),
        st.integers(0, 12 * BLOCK),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=25,
)


class Passed:
    """One block that passed, and which ranks waited when it was chosen."""

    def __init__(self, transfer: QueuedTransfer, size: int, waiting: set[TransferRank]) -> None:
        self.transfer = transfer
        self.rank = transfer.rank
        self.size = size
        self.waiting = waiting


def step(schedule: TransferSchedule, queued: list[QueuedTransfer]) -> Passed | None:
    block = schedule.choose()
    if block is None:
        return None
    waiting = {transfer.rank for transfer in queued if transfer.left_bytes}
    schedule.passed(block)
    return Passed(block.of, block.size_bytes, waiting)


def run(arrivals: Arrivals) -> tuple[list[QueuedTransfer], list[Passed]]:
    """All that arrives passes; the blocks in their order."""
    schedule, queued, passed = TransferSchedule(BLOCK), list[QueuedTransfer](), list[Passed]()
    for owner, rank, size, before in arrivals:
        for _ in range(before):
            found = step(schedule, queued)
            passed += [] if found is None else [found]
        queued.append(schedule.add(owner, rank, size))
    while (found := step(schedule, queued)) is not None:
        passed.append(found)
    return queued, passed


def names(schedule: TransferSchedule, blocks: int) -> str:
    """The owners of the next blocks."""
    found = ""
    for _ in range(blocks):
        block = schedule.choose()
        if block is None:
            break
        found += block.of.owner
        schedule.passed(block)
    return found


@given(ARRIVALS)
def test_every_byte_passes_once_when_all_that_came_has_passed(arrivals: Arrivals) -> None:
    queued, passed = run(arrivals)

    sizes = defaultdict(int, {id(transfer): 0 for transfer in queued})
    for each in passed:
        assert 0 < each.size <= BLOCK
        sizes[id(each.transfer)] += each.size
    assert [sizes[id(transfer)] for transfer in queued] == [size for _, _, size, _ in arrivals]


@given(ARRIVALS)
def test_transfers_of_one_owner_and_rank_pass_in_the_order_in_which_they_came(
    arrivals: Arrivals,
) -> None:
    queued, passed = run(arrivals)
    number = {id(transfer): place for place, transfer in enumerate(queued)}

    last: dict[tuple[str, TransferRank], int] = {}
    for each in passed:
        queue = each.transfer.owner, each.rank
        assert number[id(each.transfer)] >= last.get(queue, 0)
        last[queue] = number[id(each.transfer)]


@given(ARRIVALS)
def test_every_rank_that_waits_has_a_block_within_its_patience(arrivals: Arrivals) -> None:
    _, passed = run(arrivals)

    since = dict.fromkeys(TransferRank, 0)
    for each in passed:
        for rank in TransferRank:
            waits = rank in each.waiting and rank is not each.rank
            since[rank] = since[rank] + 1 if waits else 0
            # Two ranks may have lost patience, and a rank that comes meanwhile has one block first.
            assert since[rank] <= 2 * PATIENCE + 4


@given(ARRIVALS, st.integers(0, 30))
def test_newcomer_of_the_highest_rank_waits_for_the_block_under_way_and_no_other(
    arrivals: Arrivals, before: int
) -> None:
    schedule, queued = TransferSchedule(BLOCK), list[QueuedTransfer]()
    lower = [arrival for arrival in arrivals if arrival[1] is not CALL]
    for owner, rank, size, _ in lower:
        queued.append(schedule.add(owner, rank, size))
    for _ in range(before):
        step(schedule, queued)

    newcomer = schedule.add("new", CALL, BLOCK)

    block = schedule.choose()
    assert block is not None
    assert block.of is newcomer


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12), st.data())
def test_what_is_withdrawn_passes_no_more_and_the_rest_does(
    owners: list[str], data: st.DataObject
) -> None:
    schedule = TransferSchedule(BLOCK)
    queued = [schedule.add(owner, AWAITED, 3 * BLOCK) for owner in owners]
    gone = data.draw(st.sampled_from(queued))
    for _ in range(data.draw(st.integers(0, len(queued)))):
        step(schedule, queued)
    left_bytes = gone.left_bytes

    schedule.withdraw(gone)
    schedule.withdraw(gone)
    while step(schedule, queued) is not None:
        pass

    assert gone.left_bytes == left_bytes
    assert all(not each.left_bytes for each in queued if each is not gone)


def test_owners_take_turns_when_their_ranks_are_the_same() -> None:
    schedule = TransferSchedule(BLOCK)
    schedule.add("a", AWAITED, 4 * BLOCK)
    schedule.add("a", AWAITED, 4 * BLOCK)
    schedule.add("b", AWAITED, 2 * BLOCK)
    schedule.add("c", AWAITED, BLOCK)

    assert names(schedule, 20) == "abcab" + "a" * 6


def test_lower_rank_has_one_block_in_nine_when_a_higher_one_has_no_end() -> None:
    schedule = TransferSchedule(BLOCK)
    schedule.add("h", CALL, 1000 * BLOCK)
    schedule.add("l", BACKGROUND, 1000 * BLOCK)

    assert names(schedule, 27) == ("h" * PATIENCE + "l") * 3


def test_rank_counts_from_the_next_block_on_when_a_transfer_is_promoted() -> None:
    schedule = TransferSchedule(BLOCK)
    ahead = schedule.add("p", BACKGROUND, 3 * BLOCK)
    schedule.add("a", AWAITED, 3 * BLOCK)
    assert names(schedule, 2) == "aa"

    schedule.promote(ahead, AWAITED)

    assert names(schedule, 9) == "appp"


def test_nothing_passes_here_when_a_higher_rank_waits_elsewhere() -> None:
    schedule = TransferSchedule(BLOCK)
    schedule.add("a", AWAITED, BLOCK)

    assert schedule.choose(CALL) is None
    assert schedule.choose(BACKGROUND) is not None
    assert schedule.choose(AWAITED) is not None


def test_rank_has_its_share_when_other_processes_never_stop() -> None:
    schedule = TransferSchedule(BLOCK)
    schedule.add("a", AWAITED, 2 * BLOCK)

    def blocks_until_it_passes() -> int:
        waited = 0
        while (block := schedule.choose(CALL)) is None:
            schedule.passed_elsewhere(CALL)
            waited += 1
        schedule.passed(block)
        return waited

    assert [blocks_until_it_passes() for _ in range(2)] == [PATIENCE, PATIENCE]
    assert schedule.choose() is None
