"""The functions of stack.yml: deployed, invoked, and shown with their times and placement."""

import asyncio
import secrets
import shutil
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from gpufaas.errors import CommandError
from gpufaas.explain import in_words, story
from gpufaas.remote import Remote
from gpufaas.stack.parts import Plan
from gpufaas.status import picture
from scheduler.service.access import Role, token

_STACK = Path("stack.yml")
_READY_S = 600.0
_TRACED_S, _PAUSE_S = 60.0, 0.5
_ACCEPTED = {200, 202}
_OK = 200
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class _Example:
    name: str
    body: bytes
    deployment: Mapping[str, Any]

    @property
    def gpu(self) -> bool:
        """Whether it wants one; those of our template do, unless they say otherwise."""
        wish: str = self.deployment["annotations"].get("com.gpufaas.enabled", "true")
        return wish != "false"


async def show_examples(plan: Plan) -> bool:
    """Deploy and invoke them all; whether everything went well."""
    if not _STACK.is_file():
        raise CommandError(f"there is no {_STACK} here; run it where the examples are")
    examples = [_example(name, said) for name, said in _functions().items()]
    cli = shutil.which("faas-cli")
    password = (plan.gateway_credentials / "basic-auth-password").read_text().strip()
    user = (plan.gateway_credentials / "basic-auth-user").read_text().strip()
    credentials = {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(plan.gateway_url, timeout=timeout) as session:
        if cli is None:
            await _deploy_by_rest(session, credentials, examples)
        else:
            await _deploy_by_cli(cli, plan, password)
        bearer = token(plan.folder.secret_file.read_bytes(), Role.CALLER)
        asked = Remote((plan.scheduler_url,), bearer)
        found = [await _show(session, credentials, asked, example) for example in examples]
        print(f"\n{picture(await asyncio.to_thread(asked.get, '/cluster'))}\n", flush=True)
    return all(found)


def _functions() -> dict[str, dict[str, Any]]:
    try:
        found: dict[str, dict[str, Any]] = yaml.safe_load(_STACK.read_text())["functions"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CommandError(f"{_STACK}: {error}") from error
    return found


def _example(name: str, said: Mapping[str, Any]) -> _Example:
    """A function as faas-cli would deploy it, and the body that its folder proposes."""
    template = yaml.safe_load(Path("template", said["lang"], "template.yml").read_text())
    body = Path(said["handler"], "example.json")
    deployment = {
        "service": name,
        "image": said["image"],
        "envProcess": template["fprocess"],
        "envVars": {key: str(value) for key, value in said.get("environment", {}).items()},
        "labels": said.get("labels", {}),
        "annotations": said.get("annotations", {}),
        "secrets": said.get("secrets", []),
    }
    return _Example(name, body.read_bytes() if body.is_file() else b"", deployment)


async def _deploy_by_cli(cli: str, plan: Plan, password: str) -> None:
    """With faas-cli's own word on its way; its login is kept apart from the user's."""
    print(f"deploying {_STACK} with {cli}", flush=True)
    environment = {**plan.environment, "OPENFAAS_CONFIG": str(plan.folder.root / "faas-cli")}
    gateway = ("--gateway", plan.gateway_url)
    login = (cli, "login", *gateway, "--password-stdin")
    await _ran(login, environment, password)
    await _ran((cli, "deploy", "-f", str(_STACK), *gateway), environment, "")


async def _ran(command: tuple[str, ...], environment: Mapping[str, str], said: str) -> None:
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    output, _ = await child.communicate(said.encode())
    if child.returncode:
        raise CommandError(f"{' '.join(command)} failed:\n{output.decode(errors='replace')}")


async def _deploy_by_rest(
    session: aiohttp.ClientSession, credentials: Mapping[str, str], examples: list[_Example]
) -> None:
    print(f"deploying {_STACK} by REST (faas-cli is not on the PATH)", flush=True)
    for example in examples:
        async with session.post(
            "/system/functions", json=example.deployment, headers=credentials
        ) as answer:
            if answer.status not in _ACCEPTED:
                raise CommandError(f"{example.name}: {await answer.text()}")


async def _show(
    session: aiohttp.ClientSession,
    credentials: Mapping[str, str],
    asked: Remote,
    example: _Example,
) -> bool:
    """Invoke one; what it answered, how long it took, and why it went where it went."""
    await _ready(session, credentials, example.name)
    said = await _call(session, example, "first")
    if said is None:
        return False
    print(f"  {' '.join(said.split())[:_SHOWN]}", flush=True)
    if not example.gpu:
        return await _call(session, example, "again") is not None
    return await _on_gpu(session, asked, example)


async def _on_gpu(session: aiohttp.ClientSession, asked: Remote, example: _Example) -> bool:
    """Call until a GPU answers: until its graph is traced a function computes for itself."""
    patience_s = time.monotonic() + _TRACED_S
    call_id = ""
    while not await asyncio.to_thread(_story, asked, call_id):
        if time.monotonic() > patience_s:
            print(f"\n{example.name} was on no GPU within {_TRACED_S:g} s", flush=True)
            return False
        await asyncio.sleep(_PAUSE_S)
        call_id = _call_id(example)
        if await _call(session, example, "", call_id) is None:
            return False
    call_id = _call_id(example)
    if await _call(session, example, "on a GPU", call_id) is None:
        return False
    await asyncio.sleep(_PAUSE_S)  # its lease is released behind the answer
    told = await asyncio.to_thread(story, asked, call_id)
    print("\n".join(f"  {line}" for line in in_words(told).splitlines()), flush=True)
    return True


async def _call(
    session: aiohttp.ClientSession, example: _Example, when: str, call_id: str = ""
) -> str | None:
    """One call, and its time where `when` names it; None where it failed, which is said."""
    headers = {
        "X-Call-Id": call_id or _call_id(example),
        "Content-Type": "application/json",
    }
    began_s = time.monotonic()
    async with session.post(
        f"/function/{example.name}", data=example.body, headers=headers
    ) as answer:
        said = (await answer.read()).decode(errors="replace").strip()
    took_ms = (time.monotonic() - began_s) * 1000
    if answer.status != _OK:
        print(f"\n{example.name} answered {answer.status}: {said}", flush=True)
        return None
    if when:
        print(f"\n{example.name}, {when}: {took_ms:.0f} ms", flush=True)
    return said


def _call_id(example: _Example) -> str:
    return f"{example.name}-{secrets.token_hex(4)}"


def _story(asked: Remote, call_id: str) -> dict[str, Any] | None:
    """What the scheduler has to tell of a call; nothing where it was not asked."""
    if not call_id:
        return None
    try:
        return story(asked, call_id)
    except CommandError:
        return None


async def _ready(session: aiohttp.ClientSession, credentials: Mapping[str, str], name: str) -> None:
    """Wait for an instance; what keeps it from coming is told."""
    patience_s = time.monotonic() + _READY_S
    while True:
        async with session.get(f"/system/function/{name}", headers=credentials) as answer:
            found = await answer.json(content_type=None) if answer.status == _OK else {}
        if found.get("availableReplicas"):
            return
        if time.monotonic() > patience_s:
            trouble = found.get("annotations", {}).get("com.gpufaas.trouble", "no reason is known")
            raise CommandError(f"{name} is not ready after {_READY_S:g} s: {trouble}")
        await asyncio.sleep(0.2)
