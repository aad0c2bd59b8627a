"""Reads a worker's reports of merged calls, which are checked: it has read what tenants sent."""

import logging

from gpu_manager.runtimes.merged_sums import MergedSums
from gpu_manager.worker import worker_orders
from gpu_manager.worker.merging.known_merges import KnownRecord, is_name
from gpu_manager.worker.merging.merge_records import Singly

log = logging.getLogger(__name__)

_REASONS = frozenset(map(str, Singly))  # the only ones that are counted


def merged_sums(order: worker_orders.CallsMerged) -> MergedSums:
    """What was added, without reasons and programs that cannot be."""
    pairs = zip(order.reasons, order.singly, strict=False)
    singly = {reason: times for reason, times in pairs if reason in _REASONS}
    told = zip(order.never[::2], order.never[1::2], strict=False)
    never = {digest: why for digest, why in told if why in _REASONS and is_name(digest)}
    return MergedSums(order.groups, order.calls, order.compared, singly, never)


def learned_records(order: worker_orders.MergesLearned) -> list[KnownRecord]:
    """The records; ValueError unless all can be what a worker has measured."""
    pairs = zip(order.names, order.records, strict=True)
    return [KnownRecord.of_row(name, row) for name, row in pairs]


def records_to_keep(order: worker_orders.MergesLearned, worker: str) -> list[KnownRecord]:
    """The records; none if any of them cannot be what a worker has measured."""
    try:
        return learned_records(order)
    except ValueError as error:
        log.warning("worker %s: a record of merged calls: %s", worker, error)
        return []
