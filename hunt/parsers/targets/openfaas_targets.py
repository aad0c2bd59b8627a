"""What OpenFaaS's clients and providers say: JSON, annotations and labels, amounts, addresses."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from cache_manager.model.errors import CacheError
from common import addresses, numerals
from common.errors import BadAddress, BadSize
from gateway_ext.bounded_json import decoded, parsed
from gateway_ext.calls.learned import Learned
from gateway_ext.errors import BadDeployment, BadRequest
from gateway_ext.jobs.callbacks import CallbackRule, callback_lane
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options, system_routes, wire
from gateway_ext.openfaas.basic_auth import Auth, BasicCredentials
from gateway_ext.ui import routes
from hunt.parsers.parser_target import InputForm, Target

_FUNCTION = FunctionId("openfaas-fn", "f")
_CLIENT = "clients with the gateway's password"
_BODY = "the gateway's bound on bodies of its own API"
_JSON = ("gateway_ext/openfaas/wire.py", "gateway_ext/bounded_json.py")
_DEPLOYED = {
    "service": "f", "namespace": "openfaas-fn", "image": "i:1", "envProcess": "python -m x --gpu",
    "envVars": {"exec_timeout": "1m30s", "a": "b"}, "constraints": ["nvidia.com/gpu.product=T4"],
    "secrets": ["s.1"], "labels": {"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "4"},
    "annotations": {"com.gpufaas.memory": "2GiB", "com.gpufaas.slo": "250ms"},
    "limits": {"memory": "128Mi", "cpu": "250m", "nvidia.com/gpu": 1},
    "requests": {"memory": "64Mi"}, "readOnlyRootFilesystem": True,
}  # fmt: skip
_STATUS = _DEPLOYED | {
    "name": "f", "replicas": 2, "availableReplicas": 1, "createdAt": "2025-01-02T03:04:05.5Z",
    "usage": {"cpu": 12.5, "totalMemoryBytes": 1000},
}  # fmt: skip
_ANNOTATIONS = """\
com.gpufaas.enabled=true
com.gpufaas.model=a, b
com.gpufaas.memory=1.5GiB
com.gpufaas.slo=1m30s
com.gpufaas.priority=-3
com.gpufaas.retry=idempotent
com.gpufaas.retries=2
com.gpufaas.keep=yes
com.gpufaas.timeout=90
com.gpufaas.workers=2
com.gpufaas.concurrency=0
com.gpufaas.queue=10
com.gpufaas.max-wait=500ms
com.gpufaas.template=false
com.gpufaas.exit=never
com.gpufaas.runtime=stream
com.gpufaas.share=25%
com.gpufaas.batch=off
com.gpufaas.batch-handler=8
com.gpufaas.batch-wait=5ms
com.gpufaas.weight=2.5
com.gpufaas.gpu-seconds=10
com.gpufaas.gpu-window=60
com.gpufaas.memory-quota=1Gi
com.gpufaas.leases=2
com.gpufaas.waiting=7
com.openfaas.scale.min=1
com.openfaas.scale.max=10
com.openfaas.scale.factor=20
com.openfaas.scale.zero=true
com.openfaas.scale.zero-duration=15m
com.openfaas.scale.target=50
com.openfaas.scale.target-proportion=0.9
com.openfaas.scale.type=rps
com.openfaas.profile=nvidia-gpu
"""

T = TypeVar("T")


def targets() -> list[Target]:
    """All of this file."""
    return [*_requests(), _page(), *_answers(), _annotations(), *_texts(), *_headers()]


def _json_target(
    name: str,
    parse: Callable[[bytes], Any],
    *seeds: object,
    sender: str = _CLIENT,
    encode: Callable[[Any], Any] | None = None,
) -> Target:
    return Target(
        name, parse, (BadRequest, BadDeployment),
        lambda: [json.dumps(each).encode() for each in seeds], InputForm.JSON, _JSON, sender, _BODY,
        encode=None if encode is None else lambda found: json.dumps(encode(found)).encode(),
    )  # fmt: skip


def _requests() -> list[Target]:
    alert = {"status": "firing", "labels": {"function_name": "f.openfaas-fn"}}
    return [
        _json_target(
            "openfaas-deployment",
            wire.deployment,
            _DEPLOYED,
            encode=wire.deployment_json,
        ),
        _json_target("openfaas-scaling", wire.scaling, {"replicas": 3, "namespace": "n"}),
        _json_target(
            "openfaas-secret",
            lambda data: wire.secret(data, ""),
            {"name": "s", "namespace": "n", "value": "v", "rawValue": "YWI="},
        ),
        _json_target(
            "openfaas-namespace",
            lambda data: wire.namespace(data, ""),
            {"name": "n", "labels": {"a": "b"}, "annotations": {"openfaas": "1"}},
            encode=wire.namespace_json,
        ),
        _json_target("openfaas-alerts", wire.alerts, {"alerts": [alert, alert]}),
        _json_target(
            "openfaas-removal",
            lambda data: wire.function_to_remove(data, ""),
            {"functionName": "f.n", "namespace": "n"},
        ),
    ]


def _page() -> Target:
    choice = {"name": "lalbo3", "parameters": {"limit": 25}}
    return Target(
        "page-body", lambda data: decoded(data, routes.Policy), (BadRequest,),
        lambda: [json.dumps(choice).encode()], InputForm.JSON, ("gateway_ext/ui/routes.py",),
        _CLIENT, _BODY,
    )  # fmt: skip


def _answers() -> list[Target]:
    provider = "another OpenFaaS provider"
    line = {"name": "f", "instance": "i", "timestamp": "2025-01-02T03:04:05Z", "text": "a"}

    def status(data: bytes) -> Any:
        found = wire.status_of(parsed(data), "openfaas-fn")
        function_options.of(found.deployment)
        return found

    def listed(data: bytes) -> Any:
        statuses = parsed(data)
        values = statuses if isinstance(statuses, list) else [statuses]
        return [wire.status_of(each, "openfaas-fn") for each in values]

    def logged(data: bytes) -> Any:
        return wire.log_line_of(data, _FUNCTION)

    return [
        _json_target(
            "provider-status",
            status,
            _STATUS,
            sender=provider,
            encode=lambda found: wire.status_json(found, 0.0),
        ),
        _json_target(
            "provider-log-line",
            logged,
            line,
            sender=provider,
            encode=lambda found: json.loads(wire.log_line(found)),
        ),
        _json_target(
            "provider-list",
            listed,
            [_STATUS],
            sender=provider,
        ),
    ]


def _annotations() -> Target:
    def options(data: bytes) -> object:
        pairs = [line.partition("=") for line in data.decode("utf-8", "replace").split("\n")]
        given = {name: value for name, _, value in pairs if name}
        half = dict(list(given.items())[: len(given) // 2])
        return function_options.of(Deployment(_FUNCTION, "i", labels=half, annotations=given))

    return Target(
        "annotations", options, (BadDeployment,),
        lambda: [_ANNOTATIONS.encode(), b"com.gpufaas.exit=fixed:10,20,30,60"],
        InputForm.TEXT,
        ("gateway_ext/openfaas/function_options.py",
         "gateway_ext/openfaas/quantities.py"),
        "whoever deploys a function", _BODY,
    )  # fmt: skip


def _text_target(
    name: str,
    parse: Callable[[str], T],
    refusals: tuple[type[BaseException], ...],
    seeds: tuple[str, ...],
    reads: str,
    *,
    sender: str = "people, in settings and flags",
    encode: Callable[[T], str] | None = None,
) -> Target:
    return Target(
        name, lambda data: parse(data.decode("utf-8", "replace")), refusals,
        lambda: [seed.encode() for seed in seeds], InputForm.TEXT, (reads,), sender,
        "one setting, variable, header or query",
        encode=None if encode is None else lambda found: encode(found).encode(),
    )  # fmt: skip


def _texts() -> list[Target]:
    rule = CallbackRule(allowed=("10.0.0.0/8", "host:81", "[::1]"), own=("0.0.0.0", 8080))

    def callback(url: str) -> None:
        callback_lane(url)
        rule.target(url)

    tls = f"tls:h:443#{'0a' * 32}"
    return [
        _text_target(
            "address", addresses.parse_address, (BadAddress,),
            ("unix:/run/m", "unix:@m", "tcp:[::1]:70", "tcp:h:0", tls), "common/addresses.py",
            sender="schedulers and nodes, which pass addresses on", encode=str,
        ),
        _text_target(
            "listen-address", addresses.host_and_port, (BadAddress,),
            ("127.0.0.1:80", "[::1]:80", ":80"), "common/addresses.py",
            encode=lambda found: addresses.address_text(*found),
        ),
        _text_target(
            "size", numerals.parse_size, (BadSize,), ("512MiB", "1.5GB", "2g", "7 k", "1"),
            "common/numerals.py",
        ),
        _text_target(
            "callback-url", callback, (BadRequest,),
            ("http://host:81/a?b", "https://[::ffff:10.0.0.1]/", "http://127.1:8080/function/f",
             "http://xn--bcher-kva.example/", "http://localhost:8080/function/f"),
            "gateway_ext/jobs/callbacks.py", sender="callers of functions",
        ),
        _text_target(
            "logs-query", _logs_query, (BadRequest,),
            ("name=f.n&tail=5&follow=1&since=2025-01-02T03:04:05Z&instance=i", "name=f"),
            "gateway_ext/openfaas/system_routes.py", sender=_CLIENT,
        ),
        _text_target(
            "exit-rule", function_options._exit_rule, (ValueError, CacheError),  # noqa: SLF001 - the only reader of rules from annotations
            ("never", "fixed:10,20,30,60", "learned"), "cache_manager/exits/__init__.py",
            sender="whoever deploys a function",
        ),
    ]  # fmt: skip


def _logs_query(text: str) -> object:
    scope = {"query_string": text.encode("latin-1", "replace")}
    found = system_routes._query(scope)  # noqa: SLF001 - the route itself waits for lines
    return None if found.since is None else wire.timestamp(found.since)


def _headers() -> list[Target]:
    auth = Auth(BasicCredentials("admin", "secret"))

    def reported(data: bytes) -> None:
        learned = Learned(_FUNCTION)
        for part in data.split(b"\n"):
            learned.saw(part)
            learned.saw_local(part)

    return [
        Target(
            "basic-auth", auth.holds, (), lambda: [b"Basic YWRtaW46c2VjcmV0", b"basic eA==", b"x"],
            InputForm.TEXT, ("gateway_ext/openfaas/basic_auth.py",), "whoever connects",
            "64 KiB of headers",
        ),
        Target(
            "function-reports", reported, (),
            lambda: [b"0123456789abcdef0123,ABCDEF0123456789abcd,x", b"a|b at f.py:3|\xff\n0"],
            InputForm.TEXT,
            ("gateway_ext/calls/learned.py",),
            "functions, in headers of their answers", "64 KiB of headers",
        ),
    ]  # fmt: skip
