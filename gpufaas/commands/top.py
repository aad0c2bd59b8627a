"""`gpufaas top`: the gateway's page at a terminal: GPUs, functions, queue and decisions."""

import argparse
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial

from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.request_text import request_text
from gpufaas.remote.gateway_api import GatewayApi, add_gateway_options, gateway_api
from gpufaas.remote.scheduler_api import in_path
from gpufaas.top.panels import PANELS, State
from gpufaas.top.screen import ScreenView, frame, full_listing, rows_of, selected_index
from gpufaas.top.styled_text import StyledText, painted
from gpufaas.top.terminal import Terminal, terminal

_LOOK_S = 1.0
_DECISIONS = next(number for number, panel in enumerate(PANELS) if panel.name == "decisions")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("top", help="GPUs, functions, queue and decisions, live")
    parser.add_argument("--once", action="store_true", help="print everything once and end")
    parser.add_argument("--json", action="store_true", help="print the state as JSON and end")
    add_gateway_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    environment: Mapping[str, str] = options.environment
    gateway = gateway_api(options)
    at_terminal = sys.stdout.isatty() and sys.stdin.isatty()
    # https://no-color.org: any value but the empty one
    plain = bool(environment.get("NO_COLOR")) or environment.get("TERM", "dumb") == "dumb"
    if options.json or options.once or not at_terminal:
        text = partial(_printed, colours=sys.stdout.isatty() and not plain)
        return print_answer(gateway.get("/ui/state"), options, text)
    with terminal(colours=not plain) as screen:
        _Top(gateway, screen).run()
    return 0


def _printed(state: State, *, colours: bool) -> str:
    why = "" if state["scheduler"]["ok"] else state["scheduler"]["why"]
    width = shutil.get_terminal_size((120, 40)).columns
    lines = full_listing(state, why, width, whole=not sys.stdout.isatty())
    return "\n".join(painted(line, colours=colours) for line in lines)


class _Top:
    """Draws the state when it changes, and handles keys."""

    def __init__(self, gateway: GatewayApi, screen: Terminal) -> None:
        self._gateway = gateway
        self._screen = screen
        self._reader = StateReader(gateway, screen.wake)
        self._view = ScreenView()
        self._keys: Mapping[str, Callable[[], None]] = {
            "up": lambda: self._move(-1),
            "down": lambda: self._move(1),
            "page up": lambda: self._move(1 - screen.size[1] // 2),
            "page down": lambda: self._move(screen.size[1] // 2 - 1),
            "home": lambda: self._move(-1_000_000),
            "end": lambda: self._move(1_000_000),
            "left": lambda: self._turn(self._view.panel - 1),
            "right": lambda: self._turn(self._view.panel + 1),
            "enter": self._open,
            "escape": self._close,
        }

    def run(self) -> None:
        self._reader.start()
        try:
            while not self._screen.ended:
                self._draw()
                for key in self._screen.keys(_LOOK_S):
                    if key == "quit":
                        return
                    self._press(key)
        finally:
            self._reader.stop()

    def _draw(self) -> None:
        width, height = self._screen.size
        state, trouble = self._reader.latest()
        if state is None:
            text = trouble or f"asking {self._gateway.url} ..."
            self._screen.draw([[StyledText(text[:width])]])
            return
        if not trouble and not state["scheduler"]["ok"]:
            trouble = state["scheduler"]["why"]
        self._screen.draw(frame(state, trouble, self._view, width, height))

    def _press(self, key: str) -> None:
        if key.isdecimal():
            number = int(key) - 1
            if number in range(len(PANELS)):
                self._turn(number)
        elif key in self._keys:
            self._keys[key]()

    def _move(self, by: int) -> None:
        view, (state, _) = self._view, self._reader.latest()
        if view.opened:
            view.scrolled = max(0, view.scrolled + by)
        elif state is not None:
            rows = rows_of(state, view, self._screen.size[0])
            if rows:
                at = max(0, min(len(rows) - 1, selected_index(rows, view) + by))
                view.selected[view.panel] = rows[at].key

    def _turn(self, panel: int) -> None:
        self._close()
        self._view.panel = panel % len(PANELS)

    def _open(self) -> None:
        view, (state, _) = self._view, self._reader.latest()
        rows = [] if state is None else rows_of(state, view, self._screen.size[0])
        if not rows or view.opened:
            return
        key = rows[selected_index(rows, view)].key
        view.selected[view.panel] = view.opened = key
        view.scrolled, view.explanation = 0, ""
        if view.panel == _DECISIONS:
            view.explanation = "asking why ..."
            threading.Thread(target=self._explain, args=(key,), daemon=True).start()

    def _explain(self, request: str) -> None:
        """Request the explanation in a thread, so that the screen stays live."""
        try:
            text = request_text(self._gateway.get(f"/ui/decisions/{in_path(request)}"))
        except CommandError as error:
            text = str(error)
        if self._view.opened == request:
            self._view.explanation = text
            self._screen.wake()

    def _close(self) -> None:
        self._view.opened = None
        self._view.explanation = ""


class StateReader:
    """Asks until it is stopped; `notify` is called, in the thread, after each answer."""

    def __init__(
        self, gateway: GatewayApi, notify: Callable[[], None], every_s: float = 1.0
    ) -> None:
        self._gateway = gateway
        self._notify = notify
        self._every_s = every_s
        self._latest: tuple[State | None, str] = (None, "")
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread, which does not keep the process alive."""
        threading.Thread(target=self._run, name="state-reader", daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def latest(self) -> tuple[State | None, str]:
        """The last state, and why it may be out of date (or an empty text)."""
        return self._latest

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                state = self._gateway.get("/ui/state")
                if not isinstance(state, dict) or "scheduler" not in state:
                    raise CommandError(f"{self._gateway.url} answers what is no state of a page")
                self._latest = (state, "")
            except CommandError as error:
                self._latest = (self._latest[0], str(error))
            self._notify()
            self._stopped.wait(self._every_s)
