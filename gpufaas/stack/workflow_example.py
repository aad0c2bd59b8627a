"""Deploys and calls the workflow of the examples; prints its stages and their times."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from textwrap import indent

import aiohttp

from gpufaas.errors import CommandError
from gpufaas.output.workflow_text import workflow_text

_FILE = Path("workflow.yml")
_NAME = "describe-picture"
# The workflow takes what this function takes.
_INPUT = Path("functions", "classify")
_STORED = 202
_SHOWN = 160


async def show_workflow(
    system: aiohttp.ClientSession, call: Callable[[str, Path, str], Awaitable[str | None]]
) -> bool:
    """Whether the workflow's call succeeded; True without a workflow.yml here."""
    if not _FILE.is_file():
        return True
    async with system.post("/system/workflows", data=_FILE.read_bytes()) as answer:
        if answer.status != _STORED:
            raise CommandError(f"{_FILE}: {await answer.text()}")
    content = await call(f"/workflow/{_NAME}", _INPUT, "all its stages")
    if content is None:
        return False
    print(f"  {' '.join(content.split())[:_SHOWN]}", flush=True)
    async with system.get(f"/system/workflow/{_NAME}") as answer:
        workflow = await answer.json(content_type=None)
    print(indent(workflow_text(workflow), "  "), flush=True)
    return True
