"""Reported times of graph calls: in the request's order, and bounded."""

import pytest

from gateway_ext.tracing.tracer import ReportedTrace, read_report
from torch_shim.leases import request_context
from torch_shim.wire import current_call
from torch_shim.wire.current_call import Timings

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAID = f"00-{TRACE}-{CALLER}-01"


def read(entries: list[str]) -> ReportedTrace:
    """As the gateway reads them."""
    return read_report(" ".join(("1", *entries)).encode("latin-1"))


def test_call_is_told_with_what_its_worker_measured() -> None:
    found = Timings(SAID)
    with found.call() as timing:
        assert timing is not None
        assert current_call.timing() is timing
        assert timing.header == f"00-{TRACE}-{timing.span_id}-01"
        timing.acquired(timing.now_us, 7, 0.25, 0.5, "team/f/a b;c,d=é")
        timing.answered(7, 64 * "d", 4, [0.001, 0.003, 0.02, 0.002])
    assert current_call.timing() is None
    said = read(found.entries())
    (call,), (acquire,) = said.calls, said.acquires
    assert (call.span_id, acquire.parent) == (timing.span_id, timing.span_id)
    assert [call.number(letter) for letter in "lbwiko"] == [7, 4, 1000, 1000, 20000, 2000]
    assert call.facts["m"] == 12 * "d"
    assert [acquire.number(letter) for letter in "lqd"] == [7, 250_000, 500_000]
    assert acquire.facts["r"] == "team/f/a b;c,d=é"


def test_call_that_failed_says_why() -> None:
    found = Timings(SAID)
    with pytest.raises(ValueError, match="broken"), found.call():
        raise ValueError("broken; and more, of it\n" + 200 * "x")
    (call,) = read(found.entries()).calls
    assert call.facts["e"].startswith("ValueError: broken; and more, of it xxx")


def test_call_that_ran_here_says_why() -> None:
    found = Timings(SAID)
    with found.call() as timing:
        assert timing is not None
        timing.ran_locally("no GPU manager was named (GPUFAAS_ADDRESS)")
    (call,) = read(found.entries()).calls
    assert call.facts["h"] == "no GPU manager was named (GPUFAAS_ADDRESS)"


def test_many_calls_are_summed_up() -> None:
    found = Timings(SAID)
    for _ in range(100):
        with found.call() as timing:
            assert timing is not None
            for _ in range(10):
                timing.acquired(timing.now_us, 1 << 60, 1e3, 1e3, 300 * "r")
            timing.answered(1 << 60, 64 * "d", 1 << 20, [1e3, 1e3, 1e3, 1e3])
    said = read(found.entries())
    assert len(said.calls) + said.more_calls == 100
    assert said.more_us >= 0


def test_everything_fits_into_what_a_gateway_takes() -> None:
    found = Timings(SAID)
    for _ in range(100):
        with found.call() as timing:
            assert timing is not None
            request = f"openfaas-fn/{64 * 'f'}/{80 * 'h'}"
            timing.acquired(timing.now_us, 1 << 44, 1e3, 1e3, request)
            timing.answered(1 << 44, 64 * "d", 1 << 20, [1e3, 1e3, 1e3, 1e3])
    entries = found.entries()
    assert len(" ".join(entries)) < 8 << 10
    assert len(read(entries).calls) > 10


@pytest.mark.parametrize("said", ["", "nonsense", f"00-{TRACE}"])
def test_nothing_is_timed_without_a_trace(said: str) -> None:
    with request_context.given(None, None, trace=said), request_context.timed() as timing:
        assert timing is None
        assert request_context.timing_entries() == []


def test_calls_are_each_requests_own() -> None:
    with request_context.timed() as timing:
        assert timing is None
    with request_context.given(None, None, trace=SAID):
        with request_context.timed() as timing:
            assert timing is not None
        assert len(request_context.timing_entries()) == 1
    assert request_context.timing_entries() == []
