"""Callers that begin a call of every function at a fixed pace, whatever became of earlier calls."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp

_EVERY_S = 0.25
_PATIENCE_S = 60.0
_OK = 200


class CallRecord(NamedTuple):
    """One call; status 0 means that no answer came."""

    function: str
    began_s: float
    ended_s: float
    status: int
    text: str

    @property
    def succeeded(self) -> bool:
        """Whether the function's own answer came."""
        return self.status == _OK


class SteadyCallers:
    """Calls from its own thread as long as its context lasts."""

    def __init__(self, url: str, functions: Sequence[str]) -> None:
        self._url = url
        self._functions = functions
        self._calls: list[CallRecord] = []
        self._open: dict[int, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))

    def __enter__(self) -> "SteadyCallers":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopping.set()
        self._thread.join()

    def since(self, began_s: float) -> list[CallRecord]:
        """Calls that have ended, and that began at this time or were under way."""
        with self._lock:
            return [one for one in self._calls if one.ended_s >= began_s]

    def under_way(self) -> dict[str, float]:
        """For each function, how long its oldest call without an answer waits."""
        now_s = time.monotonic()
        with self._lock:
            waits = [(name, now_s - began_s) for name, began_s in self._open.values()]
        return {name: max(s for one, s in waits if one == name) for name, _ in waits}

    async def _work(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            tasks: set[asyncio.Task[None]] = set()
            number = 0
            while not self._stopping.is_set():
                for function in self._functions:
                    number += 1
                    task = asyncio.create_task(self._call(session, function, number))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(_EVERY_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, session: aiohttp.ClientSession, function: str, number: int) -> None:
        began_s = time.monotonic()
        with self._lock:
            self._open[number] = function, began_s
        status, text = 0, ""
        try:
            async with session.post(f"{self._url}/function/{function}", data=b"x") as answer:
                text = await answer.text(errors="replace")
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = repr(error)
        finally:
            with self._lock:
                del self._open[number]
        record = CallRecord(function, began_s, time.monotonic(), status, text)
        with self._lock:
            self._calls.append(record)
