"""What a GPU function is told, so that the shim wakes up in it and finds its GPU manager."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch_shim
from gateway_ext.api import FunctionId
from gpu_manager.api import Credentials, Identity
from gpufaas.errors import CommandError
from gpufaas.remote import Remote

log = logging.getLogger(__name__)

_EVERY_S = 30.0
ACTIVATE = str(Path(torch_shim.__file__).parent / "activate")


class ShimInjection:
    """Variables for functions of this machine; the GPU that they see is the cluster's largest."""

    def __init__(self, node: str, secret: bytes, scheduler: Remote) -> None:
        self._node = node
        self._credentials = Credentials(secret)
        self._scheduler = scheduler
        self._largest: Mapping[str, Any] | None = None

    def environment(self, function: FunctionId) -> Mapping[str, str]:
        """Those of one function."""
        identity = Identity(function.namespace, function.name)
        found = {
            "PYTHONPATH": ACTIVATE,
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": self._node,
            "GPUFAAS_CREDENTIAL": self._credentials.issue(identity),
        }
        if self._largest is not None:
            found["GPUFAAS_GPU_MEMORY"] = str(self._largest["memory_bytes"])
            found["GPUFAAS_GPU_NAME"] = str(self._largest["gpu_type"])
        return found

    def largest_gpu_bytes(self) -> int | None:
        """The memory of the largest GPU; None before any was seen."""
        return None if self._largest is None else int(self._largest["memory_bytes"])

    async def look(self) -> None:
        """Ask the scheduler what GPUs there are; what was known stays if it does not answer."""
        try:
            cluster = await asyncio.to_thread(self._scheduler.get, "/cluster")
        except CommandError as error:
            log.warning("functions are told of no particular GPU: %s", error)
            return
        gpus = sorted(cluster["gpus"], key=lambda gpu: (-gpu["memory_bytes"], gpu["id"]))
        self._largest = gpus[0] if gpus else self._largest

    async def keep_looking(self) -> None:
        """From now on."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()
