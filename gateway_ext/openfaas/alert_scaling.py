"""How many replicas a function is to have after one of Prometheus's alerts, as in OpenFaaS."""

import math

from gateway_ext.openfaas.function_wishes import Wishes

_ALL_PERCENT = 100


def after_alert(replicas: int, wishes: Wishes, *, firing: bool) -> int:
    """A step up while it fires, a part of the maximum; back to the minimum when it is over."""
    if not firing:
        return wishes.scale_min
    step = math.ceil(wishes.scale_max * wishes.scale_factor / _ALL_PERCENT)
    if not step:
        return replicas
    return max(wishes.scale_min, min(wishes.scale_max, replicas + step))
