"""The state of the page (docs/page.md), which a thread asks the gateway for."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from gpufaas.errors import CommandError
from gpufaas.remote.gateway_api import GatewayApi

State = Mapping[str, Any]


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
