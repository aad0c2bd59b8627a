"""Variables that have a program's torch use the GPUs of a GPU manager, or of a whole stack."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch_shim
from gpu_manager.api import FunctionCredentials, FunctionIdentity
from gpu_manager.credentials import load_secret
from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import SchedulerApi
from gpufaas.stack_folder import stack_folder
from scheduler.service.access import ApiRole, token

ACTIVATE = str(Path(torch_shim.__file__).parent / "activate")


def shim_variables(address: str, credential: str) -> dict[str, str]:
    """Have the shim send GPU work to the manager at this address."""
    return {
        "PYTHONPATH": ACTIVATE,
        "CUDA_VISIBLE_DEVICES": "",  # what the shim does not catch fails, and takes no GPU
        "GPUFAAS_ENABLED": "1",
        "GPUFAAS_ADDRESS": address,
        "GPUFAAS_CREDENTIAL": credential,
    }


def seen_gpu(memory_bytes: int, name: str) -> dict[str, str]:
    """The GPU that a program sees."""
    return {"GPUFAAS_GPU_MEMORY": str(memory_bytes), "GPUFAAS_GPU_NAME": name}


def largest_gpu(cluster: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The GPU that all programs of a cluster see; None if it has none."""
    gpus = sorted(cluster["gpus"], key=lambda gpu: (-gpu["memory_bytes"], gpu["id"]))
    return gpus[0] if gpus else None


def stack_variables(identity: FunctionIdentity, environment: Mapping[str, str]) -> dict[str, str]:
    """Have a program use the GPUs of the stack that is up; CommandError if none is, or has none."""
    folder = stack_folder(None, environment)
    running = folder.running()
    if running is None:
        raise CommandError(
            f"nothing is up in {folder.root}: `gpufaas up` starts a stack, GPUFAAS_STATE=DIR names "
            "another stack's folder; without --stack a program has GPUs of its own"
        )
    secret = load_secret(folder.secret_file, make=False)
    scheduler = SchedulerApi((running.scheduler,), token(secret, ApiRole.CALLER))
    gpu = largest_gpu(scheduler.get("/cluster"))
    if gpu is None:
        raise CommandError(f"the stack in {folder.root} has no GPU")
    credential = FunctionCredentials(secret).issue(identity)
    seen = seen_gpu(gpu["memory_bytes"], gpu["gpu_type"])
    return shim_variables(running.node, credential) | seen
