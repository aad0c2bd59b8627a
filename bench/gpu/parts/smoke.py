"""Whether anything works at all: a worker is forked, and one call goes through everything."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.gpu_bench import PartOptions, Say
from bench.gpu.results_file import Row
from bench.measure.function_process import ROOT
from bench.measure.report import MeasurementFailed
from common.time_limits import time_limit
from gpu_manager.api import GpuManagerError
from gpu_manager.runtimes.fork_client import ForkServer

_FORK_S, _EXEC_S = 70.0, 80.0
_CALLS = 5
_TOLERANCE = 1e-2  # tf32 may be on
# Plain PyTorch, with weights and inputs from the processor, so that it computes the same there.
_PROGRAM = f"""
import torch
torch.manual_seed(0)
model, x = torch.nn.Linear(64, 64), torch.rand(8, 64)
expected = model(x)
model, there = model.cuda(), x.cuda()
for _ in range({_CALLS}):
    answer = model(there)
print("apart", (answer.cpu() - expected).abs().max().item())
"""


def measure(asked: PartOptions, say: Say) -> None:
    """Two rows; MeasurementFailed at the first that makes parts with calls worthless."""
    say(asyncio.run(_forked(asked)))
    say(_executed(asked))


async def _forked(asked: PartOptions) -> Row:
    """The fork server imports torch in the root that workers see, and forks one."""
    server = ForkServer(emulated=asked.emulated)
    began_s = time.monotonic()
    try:
        async with time_limit(_FORK_S):
            worker = await server.fork()
        took_s = time.monotonic() - began_s
        worker.kill("it has been forked")
        await worker.wait_for_exit("it has been forked")
    except TimeoutError as error:
        raise MeasurementFailed(f"no worker is forked within {_FORK_S:g} s") from error
    except GpuManagerError as error:
        raise MeasurementFailed(f"workers see no torch, or cannot be forked: {error}") from error
    finally:
        await server.close()
    return {"smoke": "a worker is forked that sees torch", "took_s": took_s, "found": {}}


def _executed(asked: PartOptions) -> Row:
    """A plain program under `gpufaas exec`, whose every call a worker answers."""
    with tempfile.TemporaryDirectory(prefix="gpu-smoke") as folder:
        program = Path(folder) / "program.py"
        program.write_text(_PROGRAM, encoding="utf-8")
        command = [sys.executable, "-m", "gpufaas", "exec", "--devices", asked.devices]
        command += ["--stats", "--log-level", "debug", "--", sys.executable, str(program)]
        began_s = time.monotonic()
        try:
            ran = subprocess.run(
                command,
                cwd=ROOT,
                env=asked.environment,
                text=True,
                capture_output=True,
                check=False,
                timeout=_EXEC_S,
            )
        except subprocess.TimeoutExpired as error:
            print(_text(error.stdout), _text(error.stderr), sep="\n", flush=True)
            raise MeasurementFailed(f"`gpufaas exec` has not ended in {_EXEC_S:g} s") from error
    print(ran.stdout, ran.stderr, sep="\n", flush=True)
    if ran.returncode:
        raise MeasurementFailed(f"`gpufaas exec` ended with {ran.returncode}")
    lines = [line for line in ran.stderr.splitlines() if line.startswith("{")]
    stats: dict[str, Any] = json.loads(lines[-1])  # after all that logs and workers say
    if stats["graph_calls"] < _CALLS or stats["local_calls"]:
        raise MeasurementFailed(f"calls were not answered by a worker: {stats}")
    apart = float(ran.stdout.split()[-1])
    if apart > _TOLERANCE:
        raise MeasurementFailed(
            f"the worker's numbers are not those of the processor: {ran.stdout}"
        )
    found = {"apart": apart, "calls": stats["graph_calls"], "loads": stats["loads"]}
    took_s = time.monotonic() - began_s
    return {"smoke": "a call through everything", "took_s": took_s, "found": found}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
