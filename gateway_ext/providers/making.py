"""Makes the provider that the settings name."""

from collections.abc import Mapping
from types import MappingProxyType

from gateway_ext.errors import BadRequest
from gateway_ext.ports import Injection, Provider
from gateway_ext.providers.docker.provider import DockerProvider
from gateway_ext.providers.kubernetes.provider import KubernetesProvider
from gateway_ext.providers.process.provider import ProcessProvider
from gateway_ext.providers.process.settings import ProcessBounds
from gateway_ext.providers.upstream.provider import UpstreamProvider
from gateway_ext.settings import GatewaySettings

# What runs functions elsewhere: each is a folder that may leave, with its import and its name here.
ELSEWHERE = (DockerProvider, KubernetesProvider, UpstreamProvider)

_NOTHING: Mapping[str, str] = MappingProxyType({})
_PROXIES = frozenset({"http_proxy", "https_proxy", "no_proxy", "all_proxy"})
_CERTIFICATES = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"})


def make_provider(
    settings: GatewaySettings,
    injection: Injection | None = None,
    environment: Mapping[str, str] = _NOTHING,
) -> Provider:
    """The provider, not started yet; BadRequest if the settings name no known one.

    Variables of `environment` that tell pip where packages are go to the process provider.
    """
    if settings.provider == "process":
        for_pip = {
            name: value
            for name, value in environment.items()
            if name.startswith("PIP_") or name.lower() in _PROXIES or name in _CERTIFICATES
        }
        bounds = ProcessBounds(drain_s=settings.drain_s, pip_environment=for_pip)
        return ProcessProvider(settings, bounds, injection)
    for kind in ELSEWHERE:
        if kind.name == settings.provider:
            return kind(settings, injection)
    *names, last = [ProcessProvider.name, *(kind.name for kind in ELSEWHERE)]
    known = f"{', '.join(names)} or {last}"
    raise BadRequest(f"provider: {settings.provider!r}: {known} is expected")
