"""The whole gateway with real function processes: nobody notices updates, scaling, or their end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from gateway_ext.gateway import Gateway
from gateway_ext.providers.making import make_provider
from gateway_ext.settings import GatewaySettings
from tests.kit.waiting import PATIENCE_S, eventually

CLIENTS = 8


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Gateway]:
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        auth=False,
        state_dir=str(folder / "state"),
        builds_dir=str(folder / "build"),
        roots=(str(folder),),
        drain_s=PATIENCE_S,  # nobody's call is cut off because its instance is held up
        scaling=False,
    )
    async with Gateway(settings, make_provider(settings)) as found:
        yield found


def build(folder: Path, text: str) -> None:
    handler = folder / "build" / "f" / "function" / "handler.py"
    handler.parent.mkdir(parents=True, exist_ok=True)
    handler.write_text(
        f"import time\ndef handle(e, c):\n    time.sleep(0.01)\n    return {text!r}\n"
    )


async def called_all_the_while(url: str, work: Callable[[], Awaitable[None]]) -> Counter[str]:
    """What clients that call without pause get while the work is done."""
    answers: Counter[str] = Counter()
    over = asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        while not over.is_set():
            async with session.post(f"{url}/function/f", data=b"x") as answer:
                answers[f"{answer.status} {await answer.text()}"] += 1

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(session))
        try:
            await work()
        finally:
            over.set()
    return answers


async def test_no_call_fails_when_the_function_is_updated_and_scaled(tmp_path: Path) -> None:
    build(tmp_path, "v0")
    async with gateway(tmp_path) as there, aiohttp.ClientSession() as session:
        body = {"service": "f", "image": "f:latest"}
        url = f"{there.url}/system/functions"
        assert (await session.post(url, json=body)).status == 202

        async def until_answered(text: str) -> None:
            async def is_answered() -> bool:
                return await _answer(session, there.url) == text

            await eventually(is_answered, f"the answer {text!r}")

        async def until_available(replicas: int) -> None:
            async def are_available() -> bool:
                async with session.get(f"{there.url}/system/function/f") as answer:
                    return int((await answer.json()).get("availableReplicas", 0)) == replicas

            await eventually(are_available, f"{replicas} replicas")

        async def work() -> None:
            for version in ("v1", "v2", "v3"):
                build(tmp_path, version)
                assert (await session.put(url, json=body)).status == 202
                await until_answered(version)
            for replicas in (3, 1):
                scale = f"{there.url}/system/scale-function/f"
                sent = {"serviceName": "f", "replicas": replicas}
                assert (await session.post(scale, json=sent)).status == 202
                await until_available(replicas)

        await until_answered("v0")
        answers = await called_all_the_while(there.url, work)
        assert set(answers) == {"200 v0", "200 v1", "200 v2", "200 v3"}, answers
        assert sum(answers.values()) > 100


async def _answer(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(f"{url}/function/f") as answer:
        return await answer.text()
