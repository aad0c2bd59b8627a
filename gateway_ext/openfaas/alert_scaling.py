"""The number of replicas of a function after one of Prometheus's alerts, as in OpenFaaS."""

import math

from gateway_ext.openfaas.function_options import FunctionOptions

_ALL_PERCENT = 100


def after_alert(replicas: int, options: FunctionOptions, *, firing: bool) -> int:
    """One step up while the alert fires, a share of the maximum; the minimum once it is over."""
    if not firing:
        return options.scale_min
    step = math.ceil(options.scale_max * options.scale_factor / _ALL_PERCENT)
    if not step:
        return replicas
    return max(options.scale_min, min(options.scale_max, replicas + step))
