"""Deploys and calls the workflow of workflow.yml, and prints what its stages took."""

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from gpufaas.errors import CommandError
from gpufaas.output.workflow_text import workflow_text
from gpufaas.stack.example_body import example_body

_FILE = Path("workflow.yml")
_NAME = "describe-picture"
# The workflow takes what this function takes.
_INPUT = Path("functions", "classify")
_ACCEPTED, _OK = 202, 200
_SHOWN = 160


async def show_workflow(session: aiohttp.ClientSession, credentials: Mapping[str, str]) -> bool:
    """Whether the workflow's call succeeded; True without a workflow.yml here."""
    if not _FILE.is_file():
        return True
    async with session.post(
        "/system/workflows", data=_FILE.read_bytes(), headers=credentials
    ) as answer:
        if answer.status != _ACCEPTED:
            raise CommandError(f"{_FILE}: {await answer.text()}")
    headers = {
        "X-Call-Id": f"{_NAME}-{secrets.token_hex(4)}",
        "Content-Type": "application/json",
    }
    began_s = time.monotonic()
    body = example_body(_INPUT)
    async with session.post(f"/workflow/{_NAME}", data=body, headers=headers) as response:
        content = (await response.read()).decode(errors="replace")
    took_ms = (time.monotonic() - began_s) * 1000
    if response.status != _OK:
        print(f"\nworkflow {_NAME} answered {response.status}: {content}", flush=True)
        return False
    print(f"\nworkflow {_NAME}: {took_ms:.0f} ms", flush=True)
    print(f"  {' '.join(content.split())[:_SHOWN]}", flush=True)
    async with session.get(f"/system/workflow/{_NAME}", headers=credentials) as answer:
        found = json.loads(await answer.read())
    print("\n".join(f"  {line}" for line in workflow_text(found).splitlines()), flush=True)
    return True
