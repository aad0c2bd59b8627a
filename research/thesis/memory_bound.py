"""A lower bound on waiting that counts memory: the cost of keeping a model or loading it again.

Each copy of a model serves some of its requests, in turn. Memory has a price per byte and second.
For every price, the cheapest way to distribute the requests over copies, less the price of all
memory, bounds the waiting of every schedule. Proof: docs/decisions/0004.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# The price of keeping the largest model, in seconds of waiting a second; at most a half, by proof.
_PRICES = (0.0, 1 / 256, 1 / 128, 1 / 64, 1 / 32, 3 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
_FIRST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class ModelRequests:
    """All requests for one model, in the order of their arrival."""

    arrivals_s: Sequence[float]
    run_s: float
    load_s: float
    memory_bytes: int


def least_waiting(demands: Sequence[ModelRequests], memory_bytes: int) -> float:
    """No schedule in this much memory has less waiting and loading in sum (seconds)."""
    first_s = min(demand.arrivals_s[0] for demand in demands)
    last_s = max(demand.arrivals_s[-1] for demand in demands)
    largest = max(demand.memory_bytes for demand in demands)
    if not largest:
        return sum(_cheapest(demand, 0.0, last_s) for demand in demands)
    best = float("-inf")
    for price in _PRICES:
        paid = sum(_cheapest(d, price * d.memory_bytes / largest, last_s) for d in demands)
        bound = paid - price * memory_bytes / largest * (last_s - first_s)
        if bound < best:
            break  # the bound is concave in the price
        best = bound
    return best


def _cheapest(demand: ModelRequests, price: float, end_s: float) -> float:
    """The least cost of serving these requests by copies that cost `price` a second until then.

    A cover in which some copy's next request comes more than `width` requests later has more than
    `width` loads, and none of those is free.
    """
    width = _FIRST_WIDTH
    while True:
        cost = _cheapest_within(demand, price, end_s, width)
        if width >= len(demand.arrivals_s) or cost <= width * (1.0 - price) * demand.load_s:
            return cost
        width *= 2


def _cheapest_within(demand: ModelRequests, price: float, end_s: float, width: int) -> float:
    """Request by request; state i: only the first i requests may have a successor on their copy.

    Copies take their requests in the order of arrival, and so do their next ones (first come,
    first followed), so that each successor's predecessor is later than the one before.
    """
    rest = 1.0 - price
    warm_s = demand.arrivals_s[0] + demand.load_s + demand.run_s
    costs = [0.0]
    oldest = 0
    free: list[float] = []
    for place, arrived_s in enumerate(demand.arrivals_s):
        load = rest * demand.load_s + price * min(demand.load_s, end_s - arrived_s)
        start = rest * max(arrived_s, warm_s)
        follow = (price - rest) * arrived_s
        best = before = float("inf")
        following = []
        for state, cost in enumerate(costs, oldest):
            best = min(best, cost + load)
            if before < best:
                freed_s = free[state - 1]
                held = price * demand.arrivals_s[state - 1]
                best = min(best, before + max(start, rest * freed_s) + follow - held)
            before = cost
            following.append(best)
        following.append(best)
        if place + 1 - oldest > width:
            following.pop(0)
            oldest += 1
        costs = following
        least_wait_s = min(demand.load_s, max(0.0, warm_s - arrived_s))
        free.append(arrived_s + least_wait_s + demand.run_s)
    return costs[-1]
