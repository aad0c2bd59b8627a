"""What the command line may use of the gateway."""

from gateway_ext.auth import Credentials
from gateway_ext.errors import GatewayError
from gateway_ext.gateway import Gateway
from gateway_ext.log_lines import configure_logs
from gateway_ext.model import FunctionId
from gateway_ext.ports import Injection, Provider
from gateway_ext.posting import Posting
from gateway_ext.providers.making import make_provider
from gateway_ext.settings import GatewaySettings

__all__ = [
    "Credentials",
    "FunctionId",
    "Gateway",
    "GatewayError",
    "GatewaySettings",
    "Injection",
    "Posting",
    "Provider",
    "configure_logs",
    "make_provider",
]
