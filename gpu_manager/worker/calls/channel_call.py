"""A call together with the channel that it came over, and its answer."""

from collections.abc import Callable
from typing import NamedTuple

from gpu_manager.worker.calls.graph_call import GraphCall
from gpu_manager.worker.calls.lease_terms import USUAL_TERMS, LeaseTerms
from gpu_manager.worker.calls.results import PackedResult
from gpu_manager.worker.program.channel_state import ChannelState


class CallAnswer(NamedTuple):
    """What a call gave: the result, the generator's state, times, and numbers for the manager.

    The times are seconds: waiting for the GPU, transfer, compute, and of the transfer that back.
    Of calls that ran `together`, as one, each computed for an equal part, and waited for the rest.
    """

    result: PackedResult
    end_bytes: int
    rng: bytes | None
    times: list[float]
    batch: int
    together: int = 1


# Copies a result's bytes to where the shim will read them.
Deliver = Callable[[CallAnswer], None]


class ChannelCall(NamedTuple):
    """A call as it came over a channel, and where its answer goes.

    `deliver` copies the result's bytes to where they go, before any other call runs that could
    write to them. `terms` are those of its lease.
    """

    call: GraphCall
    channel: ChannelState
    body: memoryview
    deliver: Deliver
    terms: LeaseTerms = USUAL_TERMS
