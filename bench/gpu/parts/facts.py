"""What this machine has: `gpufaas doctor`, the GPU by NVML, and torch's build."""

import os
import platform
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA gives it no types
import torch

from bench.gpu.gpu_bench import PartOptions, Say
from bench.measure.report import load_average
from cache_manager.model.ids import NodeId
from gpu_manager.devices.host_memory import available_bytes
from gpu_manager.node.host_gpus import choose_devices
from gpufaas.commands.doctor import examine

_NODES = "/dev/nvidia*"


def measure(asked: PartOptions, say: Say) -> None:
    """The machine, the devices, torch, and what NVML answers or refuses."""
    for finding in examine():
        say({"doctor": finding.name, "state": finding.state, "found": finding.found})
    say(
        {
            "fact": "machine",
            "value": f"{platform.machine()}, {os.cpu_count()} cores, kernel {platform.release()}",
        }
    )
    say({"fact": "host memory to be had, bytes", "value": available_bytes()})
    say({"fact": "load average", "value": load_average()})
    say({"fact": "torch", "value": f"{torch.__version__}, CUDA {torch.version.cuda}"})
    say({"fact": "cuDNN", "value": torch.backends.cudnn.version()})  # type: ignore[no-untyped-call]
    nodes = ", ".join(sorted(str(path) for path in Path("/").glob(_NODES[1:])))
    say({"fact": "device files", "value": nodes or "none"})
    for device in choose_devices(
        asked.devices, NodeId("bench"), 1 << 30 if asked.emulated else None
    ):
        say({"fact": f"{device.id}", "value": f"{device.name}, {device.device_bytes} bytes"})
        say({"fact": f"{device.id} used bytes", "value": device.used_bytes()})
        say({"fact": f"{device.id} bytes by process", "value": dict(device.process_bytes())})
        say({"fact": f"{device.id} utilisation", "value": device.utilisation()})
        device.close()
    if not asked.emulated:
        _nvml(say)


def _nvml(say: Say) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    questions: dict[str, Any] = {
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "CUDA of the driver": pynvml.nvmlSystemGetCudaDriverVersion_v2,
        "compute mode": lambda: pynvml.nvmlDeviceGetComputeMode(handle),
        "MIG mode": lambda: pynvml.nvmlDeviceGetMigMode(handle),
        "ECC mode": lambda: pynvml.nvmlDeviceGetEccMode(handle),
        "persistence": lambda: pynvml.nvmlDeviceGetPersistenceMode(handle),
        "PCIe generation": lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "PCIe lanes": lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "BAR1 bytes": lambda: pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total,
        "power limit, mW": lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle),
    }
    for fact, ask in questions.items():
        try:
            say({"fact": fact, "value": str(ask())})
        except pynvml.NVMLError as error:
            say({"fact": fact, "value": f"refused: {error}"})
