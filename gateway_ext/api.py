"""What the command line may use of the gateway."""

from gateway_ext.auth import Credentials
from gateway_ext.errors import GatewayError
from gateway_ext.gateway import Gateway
from gateway_ext.model import FunctionId
from gateway_ext.ports import Injection, Provider
from gateway_ext.posting import Posting
from gateway_ext.providers.making import make_provider
from gateway_ext.settings import GatewaySettings
from gateway_ext.tracing.tracer import Tracer, TracerSettings

__all__ = [
    "Credentials",
    "FunctionId",
    "Gateway",
    "GatewayError",
    "GatewaySettings",
    "Injection",
    "Posting",
    "Provider",
    "Tracer",
    "TracerSettings",
    "make_provider",
]
