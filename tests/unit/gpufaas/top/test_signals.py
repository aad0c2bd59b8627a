"""Signals at a terminal, one of which comes while another one is handled."""

import os
import pty
import signal
import sys
from collections.abc import Iterator

import pytest

from gpufaas.top import terminal
from gpufaas.top.terminal import Terminal


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    behind, tty = pty.openpty()
    with os.fdopen(behind), os.fdopen(tty) as there:
        monkeypatch.setattr(sys, "stdin", there)
        yield Terminal(colours=False)


def test_end_is_not_forgotten_when_it_comes_while_a_resize_is_handled(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ends(tuple[int, ...]):
        """In which a look takes long enough for another signal."""

        __slots__ = ()

        def __contains__(self, number: object) -> bool:
            if number == signal.SIGWINCH:
                screen.signalled(signal.SIGTERM, None)
            return super().__contains__(number)

    monkeypatch.setattr(terminal, "_ENDS", Ends((signal.SIGTERM,)))
    screen.signalled(signal.SIGWINCH, None)
    assert screen.ended
