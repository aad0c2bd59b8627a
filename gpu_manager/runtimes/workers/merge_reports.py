"""Reads a worker's reports of merged calls, which are checked: it has read what tenants sent."""

import re

from gpu_manager.runtimes.merged_sums import MergedSums
from gpu_manager.worker import worker_orders
from gpu_manager.worker.merging.merge_records import Singly

_REASONS = frozenset(map(str, Singly))  # the only ones that are counted
_DIGEST = re.compile(r"[0-9a-f]{64}")


def merged_sums(order: worker_orders.CallsMerged) -> MergedSums:
    """What was added, without reasons and programs that cannot be."""
    pairs = zip(order.reasons, order.singly, strict=False)
    singly = {reason: times for reason, times in pairs if reason in _REASONS}
    told = zip(order.never[::2], order.never[1::2], strict=False)
    never = {digest: why for digest, why in told if why in _REASONS and _DIGEST.fullmatch(digest)}
    return MergedSums(order.groups, order.calls, order.compared, singly, never)
