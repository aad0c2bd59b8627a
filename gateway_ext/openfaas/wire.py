"""OpenFaaS's JSON and our values, both ways: deployments, statuses, secrets, namespaces, logs."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gateway_ext.bounded_json import Fields
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


class Secret(NamedTuple):
    """A secret as it was sent."""

    namespace: str
    name: str
    value: bytes


class Scaling(NamedTuple):
    """A request for a number of replicas."""

    namespace: str
    replicas: int


class Alert(NamedTuple):
    """One of Prometheus's alerts: it fires, or is over."""

    function: str
    firing: bool


# -- requests ------------------------------------------------------------------------------------


def deployment(body: bytes, namespace: str = "") -> Deployment:
    """Raise BadRequest that names the field that is wrong."""
    sent = Fields.of(body)
    id_ = valid_names.new_function_id(sent.required("service"), namespace or sent.text("namespace"))
    sent.required("image")
    asked = _deployment(sent, id_)
    _check(asked)
    return asked


def function_to_remove(body: bytes, namespace: str) -> FunctionId:
    sent = Fields.of(body)
    return valid_names.function_id(
        sent.required("functionName"), namespace or sent.text("namespace")
    )


def scaling(body: bytes) -> Scaling:
    """The namespace may be empty."""
    sent = Fields.of(body)
    replicas = sent.whole("replicas")
    if replicas is None:
        raise BadRequest("replicas is missing")
    return Scaling(sent.text("namespace"), replicas)


def secret(body: bytes, namespace: str) -> Secret:
    """A secret; its value is `rawValue` in base64, else the text `value`."""
    sent = Fields.of(body)
    value = sent.decoded("rawValue") or sent.text("value").encode()
    where = valid_names.namespace_or_default(namespace or sent.text("namespace"))
    return Secret(where, valid_names.secret_name(sent.required("name")), value)


def namespace(body: bytes, name: str) -> Namespace:
    """A namespace, named by the path or else by the body."""
    sent = Fields.of(body or b"{}")
    valid_name = valid_names.namespace_name(name or sent.text("name"))
    return Namespace(valid_name, sent.mapping("labels"), sent.mapping("annotations"))


def alerts(body: bytes) -> list[Alert]:
    sent_alerts = []
    for alert in Fields.of(body).many("alerts"):
        sent = Fields({"alert": alert}).inner("alert")
        labels = sent.mapping("labels") if sent else {}
        firing = sent is not None and sent.text("status") == "firing"
        sent_alerts.append(Alert(labels.get("function_name", ""), firing))
    return sent_alerts


def _deployment(sent: Fields, id_: FunctionId) -> Deployment:
    labels, annotations = sent.mapping("labels"), sent.mapping("annotations")
    labels.pop(_NAME_LABEL, None)
    annotations.pop(function_options.TROUBLE, None)
    annotations.pop(function_options.TEMPLATE_STATE, None)
    return Deployment(
        id=id_,
        image=sent.text("image"),
        process=sent.text("envProcess"),
        environment=sent.mapping("envVars"),
        constraints=sent.texts("constraints"),
        secrets=sent.texts("secrets"),
        labels=labels,
        annotations=annotations,
        limits=_resources(sent.inner("limits")),
        requests=_resources(sent.inner("requests")),
        read_only=sent.truth("readOnlyRootFilesystem"),
    )


def _resources(sent: Fields | None) -> Resources | None:
    if sent is None:
        return None
    gpus = (_amount(sent, maker) for maker in function_options.GPU_RESOURCES)
    gpu = next((amount for amount in gpus if amount), "")
    resources = Resources(sent.text("memory"), sent.text("cpu"), gpu)
    return resources if resources != Resources() else None


def _amount(sent: Fields, name: str) -> str:
    """GPUs are counted, so a number is accepted like a text."""
    try:
        return sent.text(name)
    except BadRequest:
        return str(sent.whole(name))


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
    sent: Json = {
        "service": wanted.id.name,
        "namespace": wanted.id.namespace,
        "image": wanted.image,
        "envProcess": wanted.process,
        "envVars": dict(wanted.environment),
        "constraints": list(wanted.constraints),
        "secrets": list(wanted.secrets),
        "labels": dict(wanted.labels),
        "annotations": dict(wanted.annotations),
        "limits": _resources_json(wanted.limits),
        "requests": _resources_json(wanted.requests),
        "readOnlyRootFilesystem": wanted.read_only,
    }
    return {name: value for name, value in sent.items() if value}


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


def _resources_json(amounts: Resources | None) -> Json:
    if amounts is None:
        return {}
    sent = {
        "memory": amounts.memory,
        "cpu": amounts.cpu,
        function_options.GPU_RESOURCES[0]: amounts.gpu,
    }
    return {name: value for name, value in sent.items() if value}


# -- answers of another provider -------------------------------------------------------------------


def status_of(sent: Fields, namespace: str) -> FunctionStatus:
    """Raise BadRequest if the answer is invalid."""
    id_ = FunctionId(sent.text("namespace") or namespace, sent.required("name"))
    created = sent.text("createdAt")
    try:
        created_at = time_of(created) if created else datetime.fromtimestamp(0, UTC)
    except ValueError as error:
        raise BadRequest(f"createdAt: {error}") from error
    return FunctionStatus(
        deployment=_deployment(sent, id_),
        replicas=sent.whole("replicas") or 0,
        available_replicas=sent.whole("availableReplicas") or 0,
        created_at=created_at,
        usage=_usage(sent.inner("usage")),
        trouble=sent.mapping("annotations").get(function_options.TROUBLE, ""),
        template=sent.text("template"),
    )


def log_line_of(sent: Fields, function: FunctionId) -> LogLine:
    try:
        at = time_of(sent.text("timestamp"))
    except ValueError as error:
        raise BadRequest(f"timestamp: {error}") from error
    return LogLine(function, sent.text("instance"), at, sent.text("text"))


def objects(values: Sequence[Any], where: str) -> list[Fields]:
    """Raise BadRequest if an entry is no object."""
    for value in values:
        if not isinstance(value, Mapping):
            raise BadRequest(f"{where} must be JSON objects")
    return [Fields(value) for value in values]


def _usage(sent: Fields | None) -> Usage | None:
    if sent is None:
        return None
    return Usage(sent.number("cpu") or 0.0, int(sent.number("totalMemoryBytes") or 0))
