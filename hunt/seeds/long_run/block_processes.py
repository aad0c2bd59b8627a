"""Runs blocks of seeds in several processes, and goes on where one of them dies."""

import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from hunt.seeds.long_run.block_record import BlockRecord, run_block, without_result

_AHEAD = 2  # blocks that are given to each process
_MOST_BLOCKS = 500  # that a pool of processes runs, so that no leak adds up


def records_of(commit: str, blocks: Iterable[range], processes: int) -> Iterator[BlockRecord]:
    """The records of these blocks, in their order; a single process is this one."""
    waiting = deque(blocks)
    if processes == 1:
        for seeds in waiting:
            yield run_block(commit, seeds)
    else:
        while waiting:
            yield from _of_one_pool(commit, waiting, processes)


def _of_one_pool(commit: str, waiting: deque[range], processes: int) -> Iterator[BlockRecord]:
    """Take some of the blocks; where a process dies, the first block under way is to blame."""
    under_way: deque[tuple[range, Future[BlockRecord]]] = deque()
    # Ctrl+C is for the process that waits for these.
    pool = ProcessPoolExecutor(processes, get_context("fork"), initializer=_ignore_interrupts)
    try:
        for _ in range(_MOST_BLOCKS):
            while waiting and len(under_way) < processes * _AHEAD:
                under_way.append((waiting[0], pool.submit(run_block, commit, waiting[0])))
                waiting.popleft()
            if not under_way:
                return
            record = under_way[0][1].result()
            under_way.popleft()
            yield record
    except BrokenProcessPool:
        seeds = under_way.popleft()[0] if under_way else waiting.popleft()
        yield without_result(commit, seeds, "the process died that ran it, or one beside it")
    finally:
        waiting.extendleft(seeds for seeds, _ in reversed(under_way))
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
