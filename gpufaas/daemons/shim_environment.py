"""Variables that activate the shim in a GPU function and name its GPU manager."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch_shim
from common.gpu_wishes import USUAL, GpuWishes
from gateway_ext.api import FunctionId
from gpu_manager.api import FunctionCredentials, FunctionIdentity
from gpufaas.errors import CommandError
from gpufaas.remote import early_greeting
from gpufaas.remote.scheduler_api import SchedulerApi

log = logging.getLogger(__name__)

_EVERY_S = 30.0
ACTIVATE = str(Path(torch_shim.__file__).parent / "activate")


class ShimEnvironment:
    """Variables for functions of this machine; they see the cluster's largest GPU."""

    def __init__(self, node: str, secret: bytes, scheduler: SchedulerApi) -> None:
        self._node = node
        self._credentials = FunctionCredentials(secret)
        self._scheduler = scheduler
        self._largest: Mapping[str, Any] | None = None

    def environment(self, function: FunctionId, wishes: GpuWishes = USUAL) -> Mapping[str, str]:
        """The variables of one function; the GPU manager learns that the function may start."""
        identity = FunctionIdentity(function.namespace, function.name, wishes)
        variables = {
            "PYTHONPATH": ACTIVATE,
            "CUDA_VISIBLE_DEVICES": "",  # what the shim does not catch fails, and takes no GPU
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": self._node,
            "GPUFAAS_CREDENTIAL": self._credentials.issue(identity),
        }
        early_greeting.announce(self._node, variables["GPUFAAS_CREDENTIAL"])
        if self._largest is not None:
            variables["GPUFAAS_GPU_MEMORY"] = str(self._largest["memory_bytes"])
            variables["GPUFAAS_GPU_NAME"] = str(self._largest["gpu_type"])
        return variables

    def largest_gpu_bytes(self) -> int | None:
        """The memory of the largest GPU; None while no GPU is known."""
        return None if self._largest is None else int(self._largest["memory_bytes"])

    async def refresh(self) -> None:
        """Ask the scheduler for the GPUs; without an answer the known GPU stays."""
        try:
            cluster = await asyncio.to_thread(self._scheduler.get, "/cluster")
        except CommandError as error:
            log.warning("the cluster's GPUs are unknown: %s", error)
            return
        gpus = sorted(cluster["gpus"], key=lambda gpu: (-gpu["memory_bytes"], gpu["id"]))
        self._largest = gpus[0] if gpus else self._largest

    async def refresh_forever(self) -> None:
        """Refresh now and then, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.refresh()
