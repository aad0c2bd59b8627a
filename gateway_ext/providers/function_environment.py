"""Environment variables that every provider gives to functions."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import PurePosixPath

from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options, quantities
from gateway_ext.ports import Injection

# The path of the shim on the gateway's machine; images contain the shim at a path of their own.
_SHIM_PATH = "PYTHONPATH"
# The injected variables that a running container cannot do without: if one of them changes, the
# container is replaced.
_LASTING = ("GPUFAAS_ENABLED", "GPUFAAS_ADDRESS", "GPUFAAS_CREDENTIAL")
# For NVIDIA's container runtime: images made on those of CUDA or PyTorch ask it for all GPUs.
_NO_DEVICES = {"NVIDIA_VISIBLE_DEVICES": "void"}


def gpu_environment(injection: Injection | None, deployment: Deployment) -> Mapping[str, str]:
    """Variables that activate the shim; none unless the function uses a GPU."""
    if injection is None:
        return {}
    options = function_options.of(deployment)
    return injection.environment(deployment.id, options.wishes) if options.gpu else {}


def without_shim_path(injected: Mapping[str, str]) -> dict[str, str]:
    """The injected variables for an image that contains the shim."""
    return {name: value for name, value in injected.items() if name != _SHIM_PATH}


def socket_folder(injected: Mapping[str, str]) -> str:
    """The folder of the GPU manager's socket, empty without one.

    It is mounted whole, as each start of the manager makes a new socket in it.
    """
    kind, _, path = injected.get("GPUFAAS_ADDRESS", "").partition(":")
    return str(PurePosixPath(path).parent) if kind == "unix" and path.startswith("/") else ""


def injected_digest(injected: Mapping[str, str]) -> str:
    """A digest of the injected variables that last, which hides their values."""
    pairs = [(name, injected[name]) for name in _LASTING if name in injected]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16] if pairs else ""


def container_environment(
    deployment: Deployment, injected: Mapping[str, str], cores: float = math.inf
) -> dict[str, str]:
    """All variables of a container of this deployment, on a machine with so many `cores`."""
    options = function_options.of(deployment)
    limits = deployment.limits
    limit = min(math.ceil(quantities.cpus(limits.cpu)), cores) if limits and limits.cpu else None
    defaults = {
        **runtime_defaults(options),
        **({"fprocess": deployment.process} if deployment.process else {}),
        **({"OMP_NUM_THREADS": str(limit)} if limit else {}),
    }
    ours = runtime_settings(deployment.id, options) | without_shim_path(injected)
    return {**defaults, **deployment.environment, **ours, **_NO_DEVICES}


def runtime_defaults(options: function_options.FunctionOptions) -> dict[str, str]:
    """Settings of our runtime that a deployment may override."""
    # The gateway answers when the time-out passes; the runtime gives the call up a second later.
    settings = {"exec_timeout": str(math.ceil(options.timeout_s) + 1)}
    if options.concurrency:
        settings["GPUFAAS_THREADS"] = str(options.concurrency)
    return settings


def runtime_settings(
    function: FunctionId, options: function_options.FunctionOptions
) -> dict[str, str]:
    """Settings that a deployment may not override; CUDA finds no GPU in any function."""
    ours = {
        "CUDA_VISIBLE_DEVICES": "",
        "GPUFAAS_WORKERS": str(options.workers),
        "GPUFAAS_LOG_COMMAND": function.log_command,
        "GPUFAAS_SHOW_ERRORS": str(int(options.shows_errors)),
    }
    return ours | batch_settings(options)


def batch_settings(options: function_options.FunctionOptions) -> dict[str, str]:
    """Settings of our runtime for a handler that takes a list; none for any other."""
    most, wait_s, repeats = options.batches
    if not most:
        return {}
    return {
        "GPUFAAS_BATCH_HANDLER": str(most),
        "GPUFAAS_BATCH_WAIT": str(wait_s),
        "GPUFAAS_BATCH_REPEATS": str(int(repeats)),
    }
