"""The part of the GPU manager that the command line may use."""

from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.credentials import ADMINISTRATOR, FunctionCredentials, FunctionIdentity
from gpu_manager.daemon import GpuManager, MakeRuntime
from gpu_manager.errors import GpuManagerError
from gpu_manager.node.settings import MOST_SLOTS, EmulatedTimes, NodeSettings

__all__ = [
    "ADMINISTRATOR",
    "MOST_SLOTS",
    "EmulatedTimes",
    "FunctionCredentials",
    "FunctionIdentity",
    "GpuManager",
    "GpuManagerError",
    "MakeRuntime",
    "NodeSettings",
    "Scheduling",
]
