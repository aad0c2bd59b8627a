"""OpenFaaS's JSON and our values, both ways: deployments, statuses, secrets, namespaces, logs."""

import json
import re
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from gateway_ext.bounded_json import Natural, decoded, fields_of
from gateway_ext.errors import BadDeployment, BadRequest
from gateway_ext.model import (
    Deployment,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
    Resources,
    Usage,
)
from gateway_ext.openfaas import function_options, quantities, valid_names

Json = dict[str, Any]

# Status labels that responses add; in a request they are ignored.
_NAME_LABEL = "faas_function"
_VARIABLE = re.compile(r"[!-<>-~]+")  # what Docker, Kubernetes and processes all take
_SHOWN = 80
_NEVER = "1970-01-01T00:00:00Z"


class Secret(NamedTuple):
    """A secret as it was sent."""

    namespace: str
    name: str
    value: bytes


class Alert(NamedTuple):
    """One of Prometheus's alerts: it fires, or is over."""

    function: str
    firing: bool


# -- requests ------------------------------------------------------------------------------------


class _Sent(msgspec.Struct, rename="camel", omit_defaults=True):
    """A deployment, or what stands in a status for it."""

    service: str = ""
    namespace: str = ""
    image: str = ""
    env_process: str = ""
    env_vars: dict[str, str] = {}
    constraints: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits: dict[str, Any] = {}
    requests: dict[str, Any] = {}
    read_only_root_filesystem: bool = False


_MAKERS = dict(zip(("nvidia", "amd", "intel"), function_options.GPU_RESOURCES, strict=True))


class _Amounts(msgspec.Struct, rename=_MAKERS, omit_defaults=True):
    memory: str = ""
    cpu: str = ""
    # GPUs are counted, so a number is accepted like a text.
    nvidia: str | Natural = ""
    amd: str | Natural = ""
    intel: str | Natural = ""


def deployment(body: bytes, namespace: str = "") -> Deployment:
    """Raise BadRequest that names the field that is wrong."""
    sent = decoded(body, _Sent)
    name = _required("service", sent.service)
    id_ = valid_names.new_function_id(name, namespace or sent.namespace)
    _required("image", sent.image)
    asked = _deployment(sent, id_)
    _check(asked)
    return asked


class _Removal(msgspec.Struct, rename="camel"):
    function_name: str = ""
    namespace: str = ""


def function_to_remove(body: bytes, namespace: str) -> FunctionId:
    sent = decoded(body, _Removal)
    name = _required("functionName", sent.function_name)
    return valid_names.function_id(name, namespace or sent.namespace)


class Scaling(msgspec.Struct):
    """A request for a number of replicas; the namespace may be empty."""

    replicas: Natural
    namespace: str = ""


def scaling(body: bytes) -> Scaling:
    return decoded(body, Scaling)


class _SentSecret(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    value: str = ""
    raw_value: bytes = b""  # in base64; wins over the text


def secret(body: bytes, namespace: str) -> Secret:
    sent = decoded(body, _SentSecret)
    where = valid_names.namespace_or_default(namespace or sent.namespace)
    name = valid_names.secret_name(_required("name", sent.name))
    return Secret(where, name, sent.raw_value or sent.value.encode())


class SentNamespace(msgspec.Struct):
    """A namespace as it is sent, and as another provider answers."""

    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


def namespace(body: bytes, name: str) -> Namespace:
    """A namespace, named by the path or else by the body."""
    sent = decoded(body or b"{}", SentNamespace)
    return Namespace(valid_names.namespace_name(name or sent.name), sent.labels, sent.annotations)


class _Alerts(msgspec.Struct):
    alerts: list[Any] = []


class _SentAlert(msgspec.Struct):
    status: str = ""
    labels: dict[str, str] = {}


def alerts(body: bytes) -> list[Alert]:
    sent = [fields_of(alert or {}, _SentAlert, "alert") for alert in decoded(body, _Alerts).alerts]
    return [Alert(one.labels.get("function_name", ""), one.status == "firing") for one in sent]


def _required(name: str, text: str) -> str:
    if not text:
        raise BadRequest(f"{name} is missing")
    return text


def _deployment(sent: _Sent, id_: FunctionId) -> Deployment:
    for annotation in (function_options.TROUBLE, function_options.TEMPLATE_STATE):
        sent.annotations.pop(annotation, None)
    sent.labels.pop(_NAME_LABEL, None)
    return Deployment(
        id=id_,
        image=sent.image,
        process=sent.env_process,
        environment=sent.env_vars,
        constraints=sent.constraints,
        secrets=sent.secrets,
        labels=sent.labels,
        annotations=sent.annotations,
        limits=_resources(sent.limits, "limits"),
        requests=_resources(sent.requests, "requests"),
        read_only=sent.read_only_root_filesystem,
    )


def _resources(sent: dict[str, Any], where: str) -> Resources | None:
    amounts = fields_of(sent, _Amounts, where)
    gpus = amounts.nvidia, amounts.amd, amounts.intel
    gpu = next((str(amount) for amount in gpus if amount != ""), "")
    resources = Resources(amounts.memory, amounts.cpu, gpu)
    return resources if resources != Resources() else None


def _check(asked: Deployment) -> None:
    for name in asked.secrets:
        valid_names.secret_name(name)
    if not asked.image.isprintable() or "\0" in asked.process:
        raise BadDeployment("image may hold no control character, envProcess no zero byte")
    for name, value in asked.environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise BadDeployment(f"envVars: {name[:_SHOWN]!r} cannot be set")
    for where, amounts in (("limits", asked.limits), ("requests", asked.requests)):
        if amounts is not None:
            _check_amounts(where, amounts)
    function_options.of(asked)


def _check_amounts(where: str, amounts: Resources) -> None:
    for name, text, read in (
        ("memory", amounts.memory, quantities.memory_bytes),
        ("cpu", amounts.cpu, quantities.cpus),
    ):
        try:
            if text:
                read(text)
        except ValueError as error:
            raise BadDeployment(f"{where}.{name}: {text!r}: {error}") from error


# -- responses -------------------------------------------------------------------------------------


def status_json(status: FunctionStatus, invocations: float) -> Json:
    """A function's trouble is shown as an annotation."""
    sent = deployment_json(status.deployment)
    sent["name"] = sent.pop("service")
    sent["labels"] = {**status.deployment.labels, _NAME_LABEL: status.deployment.id.name}
    sent["annotations"] = dict(status.deployment.annotations)
    if status.trouble:
        sent["annotations"][function_options.TROUBLE] = status.trouble
    if status.template:
        sent["template"] = status.template  # no annotation: redeployments would seem to remove it
    sent["invocationCount"] = invocations
    sent["replicas"] = status.replicas
    sent["availableReplicas"] = status.available_replicas
    sent["createdAt"] = timestamp(status.created_at)
    if status.usage is not None:
        usage = status.usage
        sent["usage"] = {"cpu": usage.cpu_millicores, "totalMemoryBytes": usage.memory_bytes}
    return sent


def deployment_json(wanted: Deployment) -> Json:
    """Empty fields are left out."""
    sent = _Sent(
        service=wanted.id.name,
        namespace=wanted.id.namespace,
        image=wanted.image,
        env_process=wanted.process,
        env_vars=dict(wanted.environment),
        constraints=wanted.constraints,
        secrets=wanted.secrets,
        labels=dict(wanted.labels),
        annotations=dict(wanted.annotations),
        limits=_resources_json(wanted.limits),
        requests=_resources_json(wanted.requests),
        read_only_root_filesystem=wanted.read_only,
    )
    shown: Json = msgspec.to_builtins(sent)
    return shown


def _resources_json(amounts: Resources | None) -> Json:
    amounts = amounts or Resources()
    shown: Json = msgspec.to_builtins(_Amounts(amounts.memory, amounts.cpu, amounts.gpu))
    return shown


def namespace_json(entry: Namespace) -> Json:
    """A namespace; labels and annotations are never null."""
    return {
        "name": entry.name,
        "labels": dict(entry.labels),
        "annotations": dict(entry.annotations),
    }


def log_line(line: LogLine) -> bytes:
    sent = {
        "name": line.function.name,
        "namespace": line.function.namespace,
        "instance": line.instance,
        "timestamp": timestamp(line.at),
        "text": line.text,
    }
    return json.dumps(sent, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def timestamp(at: datetime) -> str:
    """RFC 3339, in UTC."""
    return at.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def time_of(text: str) -> datetime:
    """A time of RFC 3339; ValueError if the text is none, or names no zone."""
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"{text!r} is before the first year, or after the last one") from error


# -- answers of another provider -------------------------------------------------------------------


class _SentUsage(msgspec.Struct, rename="camel"):
    cpu: float = 0.0
    total_memory_bytes: float = 0.0


class _SentStatus(_Sent, rename="camel"):
    name: str = ""
    replicas: Natural = 0
    available_replicas: Natural = 0
    created_at: str = ""
    usage: dict[str, Any] = {}
    template: str = ""


def status_of(value: object, namespace: str) -> FunctionStatus:
    """Raise BadRequest if the answer is invalid."""
    sent = fields_of(value, _SentStatus, "function")
    id_ = FunctionId(sent.namespace or namespace, _required("name", sent.name))
    try:
        created_at = time_of(sent.created_at or _NEVER)
    except ValueError as error:
        raise BadRequest(f"createdAt: {error}") from error
    usage = fields_of(sent.usage, _SentUsage, "usage")
    trouble = sent.annotations.get(function_options.TROUBLE, "")
    return FunctionStatus(
        deployment=_deployment(sent, id_),
        replicas=sent.replicas,
        available_replicas=sent.available_replicas,
        created_at=created_at,
        usage=Usage(usage.cpu, int(usage.total_memory_bytes)) if sent.usage else None,
        trouble=trouble,
        template=sent.template,
    )


def secret_name_of(value: object) -> str:
    return _required("name", fields_of(value, _SentSecret, "secret").name)


class _SentLogLine(msgspec.Struct):
    instance: str = ""
    timestamp: str = ""
    text: str = ""


def log_line_of(body: bytes, function: FunctionId) -> LogLine:
    sent = decoded(body, _SentLogLine)
    try:
        at = time_of(sent.timestamp)
    except ValueError as error:
        raise BadRequest(f"timestamp: {error}") from error
    return LogLine(function, sent.instance, at, sent.text)
