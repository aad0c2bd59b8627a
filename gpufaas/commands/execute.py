"""`gpufaas exec`: runs a program under the shim with its own GPU manager."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import torch_shim
from common.addresses import UnixAddress
from gpufaas.child_programs import SignalForwarding, killed_at_end
from gpufaas.embedded_node import EmbeddedNode, embedded_node
from gpufaas.errors import CommandError
from gpufaas.options.gpu_node import POLICY, add_device_options, device_settings
from gpufaas.options.shared import Commands
from gpufaas.shim_counts import ReportFile, summed_counts

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
    address = UnixAddress(f"@gpufaas-exec-{os.getpid()}-{secrets.token_hex(8)}")
    settings = device_settings(options, "local", (address,))
    with SignalForwarding() as signals, ReportFile() as stats:
        async with embedded_node(settings, POLICY) as node:
            environment = _environment(options, node)
            if options.stats:
                environment["GPUFAAS_STATS"] = stats.path
            code = await _child(program, environment, signals)
            counts = node.status().counts
        if options.stats:
            totals = summed_counts(stats.reports(), counts)
            print(json.dumps(totals), file=sys.stderr, flush=True)
    return code


def _environment(options: argparse.Namespace, node: EmbeddedNode) -> dict[str, str]:
    environment: dict[str, str] = dict(options.environment)
    activate = str(Path(torch_shim.__file__).parent / "activate")
    path = environment.get("PYTHONPATH")
    device = node.manager.devices[0]
    return environment | {
        "PYTHONPATH": f"{activate}{os.pathsep}{path}" if path else activate,
        "CUDA_VISIBLE_DEVICES": "",  # the caller's own chose the node's devices
        "GPUFAAS_ENABLED": "1",
        "GPUFAAS_ADDRESS": str(node.addresses[0]),
        "GPUFAAS_CREDENTIAL": node.credential(_TENANT, _FUNCTION),
        "GPUFAAS_GPU_MEMORY": str(device.memory_bytes),
        "GPUFAAS_GPU_NAME": device.name,
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
