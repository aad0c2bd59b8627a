"""Environment variables that every provider gives to functions."""

import math
from collections.abc import Mapping

from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_wishes
from gateway_ext.ports import Injection

# The path of the shim on the gateway's machine; images contain the shim at a path of their own.
_SHIM_PATH = "PYTHONPATH"


def gpu_environment(injection: Injection | None, deployment: Deployment) -> Mapping[str, str]:
    """Variables that activate the shim; none unless the function wants a GPU."""
    if injection is None or not function_wishes.of(deployment).gpu:
        return {}
    return injection.environment(deployment.id)


def without_shim_path(injected: Mapping[str, str]) -> dict[str, str]:
    """The injected variables for an image that contains the shim."""
    return {name: value for name, value in injected.items() if name != _SHIM_PATH}


def runtime_defaults(wished: function_wishes.Wishes) -> dict[str, str]:
    """Settings of our runtime that a deployment may override."""
    # The gateway answers when the time-out passes; the runtime gives the call up a second later.
    found = {"exec_timeout": str(math.ceil(wished.timeout_s) + 1)}
    if wished.concurrency:
        found["GPUFAAS_THREADS"] = str(wished.concurrency)
    return found


def runtime_settings(wished: function_wishes.Wishes) -> dict[str, str]:
    """Settings of our runtime that a deployment may not override."""
    return {"GPUFAAS_WORKERS": str(wished.workers)}
