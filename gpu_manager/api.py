"""What the command line may use of the GPU manager."""

from gpu_manager.addresses import Address, TcpAddress, UnixAddress, parse_address
from gpu_manager.credentials import ADMINISTRATOR, Credentials, Identity
from gpu_manager.daemon import GpuManager, MakeRuntime
from gpu_manager.errors import GpuManagerError
from gpu_manager.ports import Scheduling
from gpu_manager.settings import Emulation, NodeSettings
from gpu_manager.sizes import format_size, parse_size

__all__ = [
    "ADMINISTRATOR",
    "Address",
    "Credentials",
    "Emulation",
    "GpuManager",
    "GpuManagerError",
    "Identity",
    "MakeRuntime",
    "NodeSettings",
    "Scheduling",
    "TcpAddress",
    "UnixAddress",
    "format_size",
    "parse_address",
    "parse_size",
]
