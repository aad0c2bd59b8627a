"""Calls that draw random numbers: one after the other, each from where the last one came to."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import torch

from torch_shim.wire.arithmetic import GeneratorTurns


def after(state: bytes) -> bytes:
    """The state of a worker that began with this one and drew once."""
    there = torch.Generator()
    there.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    torch.rand(1, generator=there)
    found: bytes = there.get_state().numpy().tobytes()
    return found


def test_no_two_calls_draw_from_one_state() -> None:
    turns = GeneratorTurns()

    def call(_: int) -> bytes | None:
        with turns.state(drawn_from=True) as sent:
            assert sent is not None
            sleep(0.01)
            turns.drawn(sent, after(sent))
            return sent

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(call, range(12)))) == 12


def test_numbers_that_were_drawn_here_meanwhile_are_not_drawn_once_more() -> None:
    turns = GeneratorTurns()
    with turns.state(drawn_from=True) as sent:
        assert sent is not None
        _, second = torch.rand(2)
        turns.drawn(sent, after(sent))
        assert torch.rand(1) != second


def test_thread_knows_the_state_that_it_sent_itself() -> None:
    turns = GeneratorTurns()
    turns.forget_sent()
    assert turns.sent is None
    with turns.state(drawn_from=True) as sent:
        pass
    assert turns.sent == sent
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: turns.sent).result() is None


def test_call_that_draws_nothing_waits_for_nobody() -> None:
    turns = GeneratorTurns()
    with turns.state(drawn_from=True), ThreadPoolExecutor(1) as pool:

        def quiet() -> None:
            with turns.state(drawn_from=False) as sent:
                assert sent is None

        pool.submit(quiet).result()
