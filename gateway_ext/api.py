"""The part of the gateway that the command line may use."""

from gateway_ext.errors import GatewayError
from gateway_ext.gateway import Gateway
from gateway_ext.model import FunctionId
from gateway_ext.openfaas.basic_auth import BasicCredentials
from gateway_ext.ports import Injection, Provider
from gateway_ext.providers.making import make_provider
from gateway_ext.settings import GatewaySettings
from gateway_ext.tracing.tracer import CallTracer

__all__ = [
    "BasicCredentials",
    "CallTracer",
    "FunctionId",
    "Gateway",
    "GatewayError",
    "GatewaySettings",
    "Injection",
    "Provider",
    "make_provider",
]
