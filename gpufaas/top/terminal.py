"""The terminal: its alternate screen, its keys and its size."""

import os
import selectors
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from gpufaas.top.styled_text import StyledText, painted

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up",
    "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[C": "right", "\x1bOC": "right", "\t": "right", "l": "right",
    "\x1b[D": "left", "\x1bOD": "left", "h": "left", "\x1b[Z": "left",
    "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1b[1~": "home", "g": "home",
    "\x1b[F": "end", "\x1b[4~": "end", "G": "end",
    "\r": "enter", "\n": "enter", "\x1b": "escape", "q": "quit", "\x03": "quit", "\x04": "quit",
}  # fmt: skip
_READ_BYTES = 1024
# Not an exception, which would be lost where it is raised in a finalizer.
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """Standard input and output as a terminal; made by `terminal`."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours
        self._input = sys.stdin.fileno()
        self._usual = termios.tcgetattr(self._input)
        # Never closed, because a thread may call `wake` until the process ends.
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._stopped = False
        self.ended = False

    @property
    def size(self) -> tuple[int, int]:
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(1, size.columns), max(1, size.lines)

    def wake(self) -> None:
        """Make `keys` return, for a redraw; callable from any thread."""
        with suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def draw(self, lines: Sequence[Sequence[StyledText]]) -> None:
        shown = [painted(line, colours=self._colours) + _TO_LINE_END for line in lines]
        self._write(_HOME + "\r\n".join(shown) + _TO_END)

    def keys(self, within_s: float) -> list[str]:
        """The next pressed keys; empty after `wake` or when the time is over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._input, selectors.EVENT_READ)
            selector.register(self._read_end, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(within_s)}
        if self._read_end in ready:
            os.read(self._read_end, _READ_BYTES)
        if self._stopped:
            self._stop()
        if self._input not in ready:
            return []
        pressed = os.read(self._input, _READ_BYTES)
        if not pressed:  # the terminal is gone
            self.ended = True
        return list(pressed_keys(pressed.decode("utf-8", "replace")))

    def enter(self) -> None:
        tty.setcbreak(self._input)
        self._write(_ENTER)

    def leave(self) -> None:
        self._write(_LEAVE)
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._usual)

    def signalled(self, number: int, _where: FrameType | None) -> None:
        """A signal handler: redraw with the new size, stop with a restored screen, or end."""
        # Only set: another signal may come between a look and what it writes.
        if number == signal.SIGTSTP:
            self._stopped = True
        if number in _ENDS:
            self.ended = True
        self.wake()

    def _stop(self) -> None:
        self._stopped = False
        self.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.enter()

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:  # the terminal is gone
            self.ended = True


@contextmanager
def terminal(*, colours: bool) -> Iterator[Terminal]:
    """The alternate screen within the context; afterwards the terminal is restored."""
    screen = Terminal(colours=colours)
    numbers = (signal.SIGWINCH, signal.SIGTSTP, *_ENDS)
    before = {number: signal.signal(number, screen.signalled) for number in numbers}
    try:
        screen.enter()
        yield screen
    finally:
        screen.leave()
        for number, handler in before.items():
            signal.signal(number, handler)


def pressed_keys(text: str) -> Iterator[str]:
    """The names of the keys in the input; other characters as themselves."""
    longest_first = sorted(_KEYS, key=len, reverse=True)
    while text:
        pressed = next((key for key in longest_first if text.startswith(key)), text[0])
        yield _KEYS.get(pressed, pressed)
        text = text[len(pressed) :]
