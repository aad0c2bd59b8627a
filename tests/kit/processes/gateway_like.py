"""A gateway without HTTP: it asks a node's scheduler for leases, and hands them to a function."""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_manager.model.ids import ModelId
from gpu_manager.credentials import load_secret
from gpu_manager.node.settings import EmulatedTimes
from scheduler.model.actions import Action, Dispatch, Finish
from scheduler.model.events import Event, LeaseReleased
from scheduler.model.values import LeaseId, Placement, Request, RequestId
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.programs.torch_forks import ForkedProgram

# Serves requests in threads: so many calls, then so many seconds of work without the GPU, which
# goes on until a file is there, where one is named.
PROGRAM = """
import json, os, sys, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
from torch_shim.leases import request_context as placement
torch.manual_seed(0)
here = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
x = torch.arange(128.0).reshape(2, 64) / 128
with torch.no_grad():
    expected = here(x)
    there = here.cuda()
saying = threading.Lock()
def answer(said):
    with placement.given(said["addresses"], said["token"]):
        right = True
        for _ in range(said["calls"]):
            with torch.no_grad():
                right = right and torch.allclose(there(x.cuda()).cpu(), expected, atol=1e-5)
        time.sleep(said["after_s"])
        while said["until"] and not os.path.exists(said["until"]):
            time.sleep(0.01)
        return {"right": right, "used": placement.used()}
def serve(said):
    try:
        found = answer(said)
    except Exception as error:
        found = {"error": repr(error)}
    with saying:
        print(json.dumps(found | {"request": said["request"]}), flush=True)
pool = ThreadPoolExecutor(16)
for line in sys.stdin:
    pool.submit(serve, json.loads(line))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function said of one request, and the lease that its caller was given for it."""

    right: bool
    used: list[str]
    request: RequestId
    lease: LeaseId | None


class GatewayLike:
    """One function under the shim, and its caller.

    `ends` and `granted` count how often each request ended and was given a lease, `returned` are
    the leases that the function gave back early.
    """

    def __init__(self, node: NodeThread, secret: bytes, environment: dict[str, str]) -> None:
        self.node = node
        self.ends: Counter[RequestId] = Counter()
        self.granted: Counter[RequestId] = Counter()
        self.returned: list[LeaseId] = []
        self.asked = 0
        self._secret = secret
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._loop = node.run(lambda _: asyncio.get_running_loop())
        # No command wants to see what an embedded node's scheduler decides.
        node.run(lambda it: setattr(it.driver, "_observer", self._note))
        self._program = ForkedProgram(PROGRAM, environment)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        self.used: Sequence[str] = ()
        self.model = ModelId("")

    def begin(self) -> None:
        """Serve the first request, which traces the model and brings its weights."""
        self.used = self.node.do(self._answered(None, 1, 0.0, "")).used
        self.model = ModelId(f"team/{self.used[0][:20]}")

    def call(self, calls: int = 1, after_s: float = 0.0) -> Answer:
        """Serve one request that has a lease."""
        return self.node.do(self.served(calls, after_s))

    async def served(self, calls: int, after_s: float, until: Path | str = "") -> Answer:
        """As a gateway does: a lease, the call, and the lease's end."""
        driver = self.node.node.driver
        self.asked += 1
        request = RequestId(f"gateway/{self.asked}")
        placement = await driver.acquire(Request(request, "team/function", (self.model,)))
        try:
            return await self._answered((request, placement), calls, after_s, until)
        finally:
            driver.release(placement.lease)

    def all_ended_once(self) -> bool:
        """Whether every request of the caller's has ended; none may have done so twice."""
        ends = [count for name, count in self.ends.items() if name.startswith("gateway/")]
        assert set(ends) <= {1}, self.ends
        return len(ends) == self.asked

    def close(self) -> None:
        self._program.stdin.close()
        self._reading.join()
        assert self._program.close() == 0

    async def _answered(
        self,
        given: tuple[RequestId, Placement] | None,
        calls: int,
        after_s: float,
        until: Path | str,
    ) -> Answer:
        name = RequestId("by itself") if given is None else given[0]
        token = None if given is None else self._token(*given)
        said: dict[str, object] = {"request": name, "addresses": self.node.address, "token": token}
        said |= {"calls": calls, "after_s": after_s, "until": str(until)}
        answer = self._waiting[name] = self._loop.create_future()
        self._program.stdin.write(json.dumps(said) + "\n")
        self._program.stdin.flush()
        found = await answer
        assert "error" not in found, found
        lease = None if given is None else given[1].lease
        return Answer(found["right"], found["used"], name, lease)

    def _token(self, request: RequestId, placement: Placement) -> str:
        claims = LeaseClaims(
            lease=placement.lease,
            request=request,
            function="team/function",
            node=placement.node,
            gpu=placement.gpu,
            slot=placement.slot,
            term=1,
            expires_s=time.time() + 60.0,
        )
        return LeaseTokens(self._secret).sign(claims)

    def _read(self) -> None:
        for line in self._program.stdout:
            found = json.loads(line)
            waiting = self._waiting.pop(found["request"])
            self._loop.call_soon_threadsafe(waiting.set_result, found)

    def _note(self, _now_s: float, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, LeaseReleased) and event.may_return:
            self.returned.append(event.lease)
        for action in actions:
            if isinstance(action, Finish):
                self.ends[action.request] += 1
            elif isinstance(action, Dispatch):
                self.granted.update(action.requests)


@contextmanager
def gateway_like(folder: Path, run_s: float, **more: Any) -> Iterator[GatewayLike]:
    """A node with one emulated GPU, a function on it, and its caller."""
    secret_file = folder / "secret"
    secret = load_secret(secret_file)
    emulation = EmulatedTimes(run_s=run_s)
    with node_thread(secret_file=secret_file, emulation=emulation, **more) as node:
        environment = {
            "PATH": os.defpath,
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": node.address,
            "GPUFAAS_CREDENTIAL": node.credential(),
            "GPUFAAS_TRACING": "wait",
        }
        found = GatewayLike(node, secret, environment)
        try:
            found.begin()
            yield found
        finally:
            found.close()
