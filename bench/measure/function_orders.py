"""Orders to a measured function and their results; free of torch."""

from dataclasses import dataclass, field

PIXELS = "pixels"  # 19 MB in, 128 KB out at batch 32
WIDE = "wide"  # 500 MB of weights
LINEAR = "linear"
LAYERS = "layers:"  # and layers x width: blocks of a language model, in half precision
COPY = "copy"  # no model: 256 MB of pinned memory go to the device


@dataclass(frozen=True, slots=True)
class FunctionOrder:
    """The model to call, how, and how often.

    `how` is `call` (the input is there), `grad` (the same, recorded), `fresh` (the input has just
    been written), `whole` (from a tensor on the host to a tensor on the host) or `graph` (a native
    replay of a recorded call; only for a native function on a GPU). With `threads`, calls are
    counted for `most_s` instead of timed.
    """

    model: str
    seed: int = 0
    batch: int = 1
    how: str = "call"
    calls: int = 1
    warm: int = 0
    most_s: float = 5.0
    threads: int = 0


@dataclass(slots=True)
class OrderResult:
    """The seconds of each call, or the calls within `elapsed_s`; and what computed the answers."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    elapsed_s: float = 0.0
    device: str = ""
    weights_bytes: int = 0
    graphs: int = 0
    local: dict[str, int] = field(default_factory=dict)
    trace_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
