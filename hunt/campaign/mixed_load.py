"""Plain, sync, async and streaming calls, begun at a steady pace, whatever became of others."""

import asyncio
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

import aiohttp
from aiohttp import web

from hunt.campaign.campaign_functions import FUNCTIONS
from hunt.campaign.judging.call_journal import CallJournal, Ending, Kind

EVERY_S = 0.5
PATIENCE_S = 100.0  # by then the gateway has said that a function is late
_START_S = 10.0
_GOOD, _ACCEPTED = 200, 202
_CALL_ID = "X-Call-Id"
_NUMBERS = 1000
_BURST = 8  # as many as an instance has threads


class MixedLoad:
    """Callers on a thread of their own; on the network on which that thread was started.

    `host` is the address of this side at which the gateway delivers results.
    """

    def __init__(self, journal: CallJournal, url: str, host: str) -> None:
        self._journal = journal
        self._url = url
        self._host = host
        self._callback_url = ""
        self._expected: dict[str, str] = {}
        self._running = threading.Event()
        self._bursting = threading.Event()
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="load")
        self.strangers: list[str] = []

    def __enter__(self) -> "MixedLoad":
        self._thread.start()
        assert self._ready.wait(_START_S), "the load does not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()
        self._stopping.set()
        self._thread.join()

    def resume(self) -> None:
        """Begin calls from now on."""
        self._running.set()

    def pause(self) -> None:
        """Begin none; those under way go on."""
        self._running.clear()

    def burst(self) -> None:
        """Begin as many at once as a function can have at once."""
        self._bursting.set()

    # -- on its thread ----------------------------------------------------------------------------

    async def _work(self) -> None:
        app = web.Application()
        app.router.add_post("/back", self._called_back)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, self._host, 0)
        await site.start()
        (address,) = runner.addresses
        self._callback_url = f"http://{self._host}:{address[1]}/back"
        self._ready.set()
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as calls,
        ):
            for number in count():
                if self._stopping.is_set():
                    break
                many = _BURST if self._bursting.is_set() else 1
                self._bursting.clear()
                for kind in [*Kind] * many if self._running.is_set() else ():
                    calls.create_task(self._call(session, kind, number % _NUMBERS))
                await asyncio.sleep(EVERY_S)
        await runner.cleanup()

    async def _call(self, session: aiohttp.ClientSession, kind: Kind, number: int) -> None:
        call = f"{kind}-{secrets.token_hex(8)}"
        function = FUNCTIONS[kind]
        expected = self._expected[call] = function.answer(number)
        headers = {_CALL_ID: call}
        way = "function"
        if kind is Kind.ASYNC:
            way, headers["X-Callback-Url"] = "async-function", self._callback_url
        self._journal.begin(kind, call)
        url = f"{self._url}/{way}/{function.name}"
        ending, status, said = await self._ended(session, url, str(number), headers)
        if ending is Ending.RIGHT and kind is not Kind.ASYNC and said != expected:
            ending = Ending.WRONG
        self._journal.end(call, ending, status, said)

    async def _ended(
        self, session: aiohttp.ClientSession, url: str, body: str, headers: Mapping[str, str]
    ) -> tuple[Ending, int, str]:
        status = 0
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                status = answer.status
                said = await answer.text(errors="replace")
        except TimeoutError as error:
            return Ending.LATE, status, repr(error)
        except aiohttp.ClientConnectorError as error:
            return Ending.UNREACHABLE, status, repr(error)
        except (aiohttp.ClientError, OSError) as error:
            return Ending.BROKEN, status, repr(error)
        good = status in {_GOOD, _ACCEPTED}
        return (Ending.RIGHT if good else Ending.STATED), status, said

    async def _called_back(self, request: web.Request) -> web.Response:
        call = request.headers.get(_CALL_ID, "")
        said = (await request.read()).decode(errors="replace")
        status = 0
        with suppress(ValueError):
            status = int(request.headers.get("X-Function-Status", ""))
        right = status == _GOOD and said == self._expected.get(call)
        if not self._journal.call_back(call, status=status, right=right, said=said):
            self.strangers.append(call)
        return web.Response()
