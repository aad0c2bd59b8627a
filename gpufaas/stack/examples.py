"""Deploys and calls the functions of stack.yml; prints times and placement."""

import asyncio
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import aiohttp
import yaml

from gateway_ext.runtime.template.example_calls import BadExample, examples_in
from gpufaas.child_programs import killed_at_end
from gpufaas.errors import CommandError
from gpufaas.output.cluster_text import cluster_text
from gpufaas.output.request_text import request_text
from gpufaas.remote.scheduler_api import SchedulerApi, request_story
from gpufaas.stack.part_commands import StackPlan
from gpufaas.stack.supervisor import Part
from gpufaas.stack.workflow_example import show_workflow
from scheduler.service.access import ApiRole, token

_STACK = Path("stack.yml")
_READY_S = 600.0
_TRACED_S, _PAUSE_S = 60.0, 0.5
_TRIES = 3
_ACCEPTED = {200, 202}
_OK = 200
_SHOWN = 160

# What features show of the examples: whether all went well.
_MORE: Sequence[Callable[..., Awaitable[bool]]] = (show_workflow,)


@dataclass(frozen=True, slots=True)
class _Example:
    name: str
    body: bytes
    deployment: Mapping[str, Any]

    @property
    def gpu(self) -> bool:
        """Whether the function uses a GPU, as those of our template do by default."""
        enabled: str = self.deployment["annotations"].get("com.gpufaas.enabled", "true")
        return enabled != "false"


async def show_examples(plan: StackPlan) -> bool:
    """Deploy and invoke all examples, then what features show; whether every call succeeded.

    If the gateway breaks a request off, as one that is started again does, all begins again.
    """
    gateway = plan.gateway()
    for _ in range(_TRIES):
        try:
            return await _show_once(plan)
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            print(f"\nthe gateway broke a request off ({why})", flush=True)
        await _until_ready(gateway)
    raise CommandError(f"the gateway broke off {_TRIES} requests; see {gateway.log}")


async def _until_ready(gateway: Part) -> None:
    deadline_s = time.monotonic() + gateway.start_s
    while not await gateway.ready():
        if time.monotonic() > deadline_s:
            text = f"the gateway is not ready after {gateway.start_s:g} s; see {gateway.log}"
            raise CommandError(text)
        await asyncio.sleep(_PAUSE_S)


async def _show_once(plan: StackPlan) -> bool:
    if not _STACK.is_file():
        raise CommandError(f"there is no {_STACK} here; run it where the examples are")
    examples = [_example(name, entry) for name, entry in _functions().items()]
    cli = shutil.which("faas-cli")
    password = (plan.gateway_credentials / "basic-auth-password").read_text().strip()
    user = (plan.gateway_credentials / "basic-auth-user").read_text().strip()
    login, timeout = aiohttp.BasicAuth(user, password, "utf-8"), aiohttp.ClientTimeout(total=120)
    bearer = token(plan.folder.secret_file.read_bytes(), ApiRole.CALLER)
    async with (
        aiohttp.ClientSession(plan.gateway_url, timeout=timeout, auth=login) as system,
        aiohttp.ClientSession(plan.gateway_url, timeout=timeout) as functions,
    ):
        gateway = _ShownGateway(system, functions, SchedulerApi((plan.scheduler_url,), bearer))
        if cli is None:
            await gateway.deploy(examples)
        else:
            await _deploy_by_cli(cli, plan, password)
        succeeded = [await gateway.show(example) for example in examples]
        succeeded += [await show(system, gateway.call_handler) for show in _MORE]
        cluster = await asyncio.to_thread(gateway.scheduler.get, "/cluster")
    print(f"\n{cluster_text(cluster)}\n", flush=True)
    return all(succeeded)


def _functions() -> dict[str, dict[str, Any]]:
    try:
        functions: dict[str, dict[str, Any]] = yaml.safe_load(_STACK.read_text())["functions"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CommandError(f"{_STACK}: {error}") from error
    return functions


def _example(name: str, entry: Mapping[str, Any]) -> _Example:
    """A function as faas-cli deploys it, and the body of the first call of its example.json."""
    template = yaml.safe_load(Path("template", entry["lang"], "template.yml").read_text())
    deployment = {
        "service": name,
        "image": entry["image"],
        "envProcess": template["fprocess"],
        "envVars": {key: str(value) for key, value in entry.get("environment", {}).items()},
        "labels": entry.get("labels", {}),
        "annotations": entry.get("annotations", {}),
        "secrets": entry.get("secrets", []),
    }
    return _Example(name, example_body(Path(entry["handler"])), deployment)


async def _deploy_by_cli(cli: str, plan: StackPlan, password: str) -> None:
    """Deploy with faas-cli, whose login is kept apart from the user's own."""
    print(f"deploying {_STACK} with {cli}", flush=True)
    environment = {**plan.environment, "OPENFAAS_CONFIG": str(plan.folder.root / "faas-cli")}
    gateway = ("--gateway", plan.gateway_url)
    login = (cli, "login", *gateway, "--password-stdin")
    await _run(login, environment, password)
    await _run((cli, "deploy", "-f", str(_STACK), *gateway), environment, "")


async def _run(
    command: tuple[str, ...], environment: Mapping[str, str], standard_input: str
) -> None:
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    async with killed_at_end(child):
        output, _ = await child.communicate(standard_input.encode())
    if child.returncode:
        raise CommandError(f"{' '.join(command)} failed:\n{output.decode(errors='replace')}")


@dataclass(frozen=True, slots=True)
class _ShownGateway:
    """Sessions at a gateway, with its login and without, and who places its calls."""

    system: aiohttp.ClientSession
    functions: aiohttp.ClientSession
    scheduler: SchedulerApi

    async def deploy(self, examples: list[_Example]) -> None:
        print(f"deploying {_STACK} by REST (faas-cli is not on the PATH)", flush=True)
        for example in examples:
            async with self.system.post("/system/functions", json=example.deployment) as answer:
                if answer.status not in _ACCEPTED:
                    raise CommandError(f"{example.name}: {await answer.text()}")

    async def show(self, example: _Example) -> bool:
        """Print an example's answer and time, and its placement if it uses a GPU."""
        await self._ready(example.name)
        path = f"/function/{example.name}"
        answer = await self._call(path, example.body, "first")
        if answer is None:
            return False
        print(f"  {' '.join(answer.split())[:_SHOWN]}", flush=True)
        if not example.gpu:
            return await self._call(path, example.body, "again") is not None
        return await self._on_gpu(example)

    async def _on_gpu(self, example: _Example) -> bool:
        """Call until a GPU answers; before its graph is traced, a function computes locally."""
        path, deadline_s = f"/function/{example.name}", time.monotonic() + _TRACED_S
        call_id = ""
        while not await asyncio.to_thread(self._is_known, call_id):
            if time.monotonic() > deadline_s:
                print(f"\n{example.name} was on no GPU within {_TRACED_S:g} s", flush=True)
                return False
            await asyncio.sleep(_PAUSE_S)
            call_id = _call_id(example.name)
            if await self._call(path, example.body, "", call_id) is None:
                return False
        call_id = _call_id(example.name)
        if await self._call(path, example.body, "on a GPU", call_id) is None:
            return False
        await asyncio.sleep(_PAUSE_S)  # the lease is released after the answer
        story = await asyncio.to_thread(request_story, self.scheduler, call_id)
        print(indent(request_text(story), "  "), flush=True)
        return True

    async def call_handler(self, path: str, handler: Path, when: str) -> str | None:
        """The answer to the first body of a handler's example.json, printed with its time."""
        return await self._call(path, example_body(handler), when)

    async def _call(self, path: str, body: bytes, when: str, call_id: str = "") -> str | None:
        """One call's answer, printed with its time if `when` names it; None if it failed."""
        name = path.rpartition("/")[2]
        headers = {"X-Call-Id": call_id or _call_id(name), "Content-Type": "application/json"}
        began_s = time.monotonic()
        async with self.functions.post(path, data=body, headers=headers) as response:
            content = (await response.read()).decode(errors="replace").strip()
        took_ms = (time.monotonic() - began_s) * 1000
        if response.status != _OK:
            print(f"\n{name} answered {response.status}: {content}", flush=True)
            return None
        if when:
            print(f"\n{name}, {when}: {took_ms:.0f} ms", flush=True)
        return content

    def _is_known(self, call_id: str) -> bool:
        """Whether the scheduler has a request of the call."""
        with suppress(CommandError):
            return bool(call_id and request_story(self.scheduler, call_id))
        return False

    async def _ready(self, name: str) -> None:
        """Wait for an instance; CommandError with the provider's reason if none comes."""
        deadline_s = time.monotonic() + _READY_S
        while True:
            async with self.system.get(f"/system/function/{name}") as answer:
                status = await answer.json(content_type=None) if answer.status == _OK else {}
            if status.get("availableReplicas"):
                return
            if time.monotonic() > deadline_s:
                known = status.get("annotations", {})
                trouble = known.get("com.gpufaas.trouble", "no reason is known")
                raise CommandError(f"{name} is not ready after {_READY_S:g} s: {trouble}")
            await asyncio.sleep(0.2)


def _call_id(name: str) -> str:
    return f"{name}-{secrets.token_hex(4)}"


def example_body(handler: Path) -> bytes:
    """The body of the first call in the handler's example.json; none without the file."""
    try:
        calls = examples_in(handler)
    except BadExample as error:
        raise CommandError(f"{handler}: {error}") from error
    return calls[0].body if calls else b""
