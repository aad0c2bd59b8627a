"""The rules alone: transfers of calls beside a load, on virtual time and at the whole speed."""

import random

from bench.transfers.path_processes import Tail
from gpu_manager.devices.loads import TransferRank
from gpu_manager.worker.transfers.path import PathTimes
from gpu_manager.worker.transfers.schedule import TransferSchedule


def calls_beside_a_load(
    bytes_per_s: float, block_bytes: int, call_bytes: int, load_bytes: int
) -> tuple[Tail, float]:
    """Seconds of each call's transfer during a load, and the share of the path that the load had.

    After each a pause of none to twice its own time.
    """
    schedule, times = TransferSchedule(block_bytes), PathTimes(bytes_per_s)
    chance, found = random.Random(17), list[float]()
    call_s = call_bytes / bytes_per_s
    load = schedule.add("load", TransferRank.AWAITED, load_bytes)
    call, begun_s, next_s, now_s = None, 0.0, chance.random() * call_s, 0.0
    while load.left_bytes:
        if call is None and next_s <= now_s:  # it came while a block was under way
            call, begun_s = schedule.add("call", TransferRank.CALL, call_bytes), next_s
        block = schedule.choose()
        assert block is not None, "the load is not over"
        _, now_s = times.span_s(block.size_bytes, now_s)
        schedule.passed(block)
        if call is not None and not call.left_bytes:
            found.append(now_s - begun_s)
            call, next_s = None, now_s + 2.0 * chance.random() * call_s
    return Tail(tuple(found)), load_bytes / bytes_per_s / now_s
