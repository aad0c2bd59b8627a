"""A headless Chromium, driven over its DevTools protocol: no driver beside the browser itself."""

import base64
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.page.devtools import (
    NETWORK_CHANGED,
    PATIENCE_S,
    BrowserError,
    DevToolsSession,
    Trouble,
    thrown,
)

_MOST_TRIES = 5
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # root in a container has none; only our own page is opened
    "--remote-debugging-port=0",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
)
_KEYS: Mapping[str, int] = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
_TYPED: Mapping[str, str] = {"Enter": "\r", " ": " "}
_SHIFT = 8


class Viewport(NamedTuple):
    """How large the page is shown, in CSS pixels."""

    width: int = 1440
    height: int = 900
    scale: float = 1.0
    phone: bool = False


PHONE = Viewport(390, 844, 2.0, phone=True)


class Browser:
    """One Chromium process; every page has a fresh context of its own."""

    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._socket = DevToolsSession(f"ws://127.0.0.1:{port}{path}")

    @contextlib.contextmanager
    def page(
        self,
        viewport: Viewport = Viewport(),  # noqa: B008 - it cannot be changed
        *,
        dark: bool = False,
        still: bool = True,
        credentials: tuple[str, str] | None = None,
    ) -> Iterator["Page"]:
        """A page that answers a request for credentials with these, or else leaves it at that.

        A `still` one prefers reduced motion, so that pictures and tests wait for no animation.
        """
        ask = self._socket.ask
        context = ask("Target.createBrowserContext")["browserContextId"]
        made = ask("Target.createTarget", url="about:blank", browserContextId=context)
        session = DevToolsSession(f"ws://127.0.0.1:{self._port}/devtools/page/{made['targetId']}")
        try:
            yield Page(session, viewport, dark=dark, still=still, credentials=credentials)
        finally:
            session.close()
            ask("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with contextlib.suppress(BrowserError):
            self._socket.ask("Browser.close")
        self._socket.close()


@contextlib.contextmanager
def browser(program: Path) -> Iterator[Browser]:
    """A Chromium with a temporary profile; all its processes end with the context."""
    with tempfile.TemporaryDirectory(prefix="page", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = Browser(*_address(Path(folder), process))
            try:
                yield found
            finally:
                found.close()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()


class Page:
    """One page. Every wait names what it waits for, and fails after PATIENCE_S."""

    def __init__(
        self,
        session: DevToolsSession,
        viewport: Viewport,
        *,
        dark: bool,
        still: bool,
        credentials: tuple[str, str] | None,
    ) -> None:
        self._session = session
        self._session.credentials = credentials
        self.ask = session.ask
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(viewport)
        self.prefer(dark=dark, still=still)

    @property
    def trouble(self) -> Trouble:
        """All of it so far."""
        self._session.catch_up()
        return self._session.trouble

    @property
    def status(self) -> int:
        """With which HTTP status the page itself was answered last."""
        return self._session.status

    def open(self, url: str, *, known: bool = False) -> None:
        """Open a URL and wait until its document has loaded.

        `known`: the browser has sent the credentials before and sends them at once, so that
        measured times include no second request.
        """
        if not known:
            self.ask("Fetch.enable", handleAuthRequests=True)
        for _ in range(_MOST_TRIES):
            self._session.broken_off = False
            self._load(url)
            if not self._session.broken_off:
                break
        # A request would wait for us while we do something else; the browser knows them by now.
        self.ask("Fetch.disable")

    def _load(self, url: str) -> None:
        self._session.loaded = False
        result = self.ask("Page.navigate", url=url)
        wrong = result.get("errorText", "")
        if NETWORK_CHANGED in wrong:
            self._session.broken_off = True
        elif wrong:
            raise BrowserError(f"{url}: {wrong}")
        self._session.until(
            lambda: self._session.loaded or self._session.broken_off, f"{url} has loaded"
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise's when it is kept."""
        result = self.ask(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in result:
            raise BrowserError(f"{script}: {thrown(result['exceptionDetails'])}")
        return result["result"].get("value")

    def until(self, script: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true; its value."""
        end_s = time.monotonic() + patience_s
        while not (found := self.run(script)):
            if time.monotonic() > end_s:
                seen = f"{self.trouble}\n{self.text()[:1500]}"
                raise BrowserError(f"not after {patience_s:g} s: {script}\n{seen}")
            time.sleep(0.04)
        return found

    def text(self, selector: str = "body") -> str:
        """The text that a person reads there; empty where there is no such element."""
        found: str = self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first such element, which has to be there."""
        x, y = self._point_at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def press(self, *keys: str, shift: bool = False) -> None:
        """Press and let go of keys, one after the other, as a keyboard does."""
        for key in keys:
            code = _KEYS.get(key) or ord(key.upper())
            text = _TYPED.get(key, key if len(key) == 1 else "")
            fields = {
                "key": key,
                "windowsVirtualKeyCode": code,
                "modifiers": _SHIFT if shift else 0,
            }
            down = "keyDown" if text else "rawKeyDown"
            self.ask("Input.dispatchKeyEvent", type=down, text=text, **fields)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.ask("Input.insertText", text=text)

    def resize(self, viewport: Viewport) -> None:
        """Show it in another size."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=viewport.width,
            height=viewport.height,
            deviceScaleFactor=viewport.scale,
            mobile=viewport.phone,
        )

    def prefer(self, *, dark: bool, still: bool = True) -> None:
        """What the person's system is set to."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def offline(self, *, is_so: bool) -> None:
        """Take the network away, or give it back."""
        self.ask(
            "Network.emulateNetworkConditions",
            offline=is_so,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        result = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """The tree that assistive technology is given."""
        found: list[Mapping[str, Any]] = self.ask("Accessibility.getFullAXTree")["nodes"]
        return found

    def _point_at(self, selector: str) -> tuple[float, float]:
        """Move the mouse onto such an element, until the page has not moved it meanwhile."""
        aim = _MIDDLE.replace("SELECTOR", json.dumps(selector))
        end_s = time.monotonic() + PATIENCE_S
        place = self.until(aim)
        while True:
            self._mouse("mouseMoved", place["x"], place["y"])
            found = self.until(aim)
            if found == place:
                return place["x"], place["y"]
            if time.monotonic() > end_s:
                raise BrowserError(f"{selector} does not rest within {PATIENCE_S:g} s")
            place = found

    def _mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The port and the path at which the browser listens, from the file in its profile."""
    end_s = time.monotonic() + PATIENCE_S
    file = folder / "DevToolsActivePort"
    while True:
        port, _, path = file.read_text().partition("\n") if file.exists() else ("", "", "")
        if path:
            return int(port), path.strip()
        if process.poll() is not None or time.monotonic() > end_s:
            raise BrowserError(f"Chromium did not come up (exit status {process.poll()})")
        time.sleep(0.02)


# The element's middle, once it is scrolled into view, does not move and is not covered.
_MIDDLE = """(async () => {
  const found = document.querySelector(SELECTOR);
  if (!found) return null;
  found.scrollIntoView({ block: "center", behavior: "instant" });
  await new Promise(requestAnimationFrame);
  const box = found.getBoundingClientRect();
  const x = box.x + box.width / 2, y = box.y + box.height / 2;
  const top = document.elementFromPoint(x, y);
  return top && (found.contains(top) || top.contains(found)) ? { x, y } : null;
})()"""
