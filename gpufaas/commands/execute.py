"""`gpufaas exec`: runs a program under the shim, with a GPU manager of its own or the stack's."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from common.addresses import UnixAddress
from gpu_manager.api import FunctionIdentity
from gpufaas.child_programs import SignalForwarding, killed_at_end
from gpufaas.embedded_node import embedded_node
from gpufaas.errors import CommandError
from gpufaas.extras import require_torch
from gpufaas.options.gpu_node import (
    POLICY,
    add_device_options,
    add_stack_option,
    device_settings,
    refuse_devices,
)
from gpufaas.options.shared import Commands
from gpufaas.shim_counts import ReportFile, summed_counts
from gpufaas.shim_environment import seen_gpu, shim_variables, stack_variables
from scheduler.api import DecisionCounts

# As shells do: for a missing program, one that cannot be run, one that a signal ended.
_EXIT_NOT_FOUND = 127
_EXIT_NOT_RUNNABLE = 126
_EXIT_SIGNAL = 128
_TENANT, _FUNCTION = "local", "exec"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "exec",
        help="run a program with GPUs: gpufaas exec -- python your_script.py",
        usage="gpufaas exec [options] -- program [arguments]",
    )
    add_device_options(parser)
    add_stack_option(parser)
    add = parser.add_argument
    tracing = "first calls wait for their graph, or run locally meanwhile (wait)"
    add("--tracing", choices=["wait", "background"], default="wait", help=tracing)
    add("--stats", action="store_true", help="print at the end, as JSON, what ran where")
    add("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise CommandError("which program? use gpufaas exec -- python your_script.py")
    level = getattr(logging, options.log_level.upper())
    logging.basicConfig(level=level, format="gpufaas: %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_execute(program, options))


async def _execute(program: list[str], options: argparse.Namespace) -> int:
    with SignalForwarding() as signals, ReportFile() as stats:
        async with _gpus(options) as gpus:
            environment = _environment(options, gpus.variables)
            if options.stats:
                environment["GPUFAAS_STATS"] = stats.path
            code = await _child(program, environment, signals)
            counts = gpus.counts()
        if options.stats:
            totals = summed_counts(stats.reports(), counts)
            print(json.dumps(totals), file=sys.stderr, flush=True)
    return code


class _Gpus(NamedTuple):
    """Where a program's GPU work goes, and what is counted there if nobody else's work is."""

    variables: Mapping[str, str]
    counts: Callable[[], DecisionCounts | None]


@asynccontextmanager
async def _gpus(options: argparse.Namespace) -> AsyncIterator[_Gpus]:
    """Those of the stack that is up, or of a GPU manager that runs within the context."""
    if options.stack:
        refuse_devices(options)
        identity = FunctionIdentity(_TENANT, _FUNCTION)
        variables = await asyncio.to_thread(stack_variables, identity, options.environment)
        yield _Gpus(variables, lambda: None)
        return
    require_torch()
    address = UnixAddress(f"@gpufaas-exec-{os.getpid()}-{secrets.token_hex(8)}")
    settings = device_settings(options, "local", (address,))
    async with embedded_node(settings, POLICY) as node:
        device = node.manager.devices[0]
        variables = shim_variables(str(node.addresses[0]), node.credential(_TENANT, _FUNCTION))
        seen = seen_gpu(device.memory_bytes, device.name)
        yield _Gpus(variables | seen, lambda: node.status().counts)


def _environment(options: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, str]:
    environment: dict[str, str] = dict(options.environment)
    path = environment.get("PYTHONPATH")
    behind = f"{os.pathsep}{path}" if path else ""
    return environment | {
        **variables,
        "PYTHONPATH": variables["PYTHONPATH"] + behind,
        "GPUFAAS_TRACING": options.tracing,
    }


async def _child(
    program: list[str], environment: Mapping[str, str], signals: SignalForwarding
) -> int:
    """Run the program on our standard streams; its exit code as a shell reports it."""
    if signals.pending is not None:
        return _EXIT_SIGNAL + signals.pending
    try:
        child = await asyncio.create_subprocess_exec(*program, env=environment)
    except FileNotFoundError:
        print(f"gpufaas exec: {program[0]}: not found", file=sys.stderr)
        return _EXIT_NOT_FOUND
    except OSError as error:
        print(f"gpufaas exec: {program[0]}: {error.strerror}", file=sys.stderr)
        return _EXIT_NOT_RUNNABLE
    signals.forward_to(child)
    async with killed_at_end(child):
        code = await child.wait()
    return code if code >= 0 else _EXIT_SIGNAL - code
