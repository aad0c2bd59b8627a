"""JSON both ways: any input gives a deployment or a BadRequest."""

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_ext.errors import BadDeployment, BadRequest
from gateway_ext.model import Deployment, FunctionId, FunctionStatus, Resources, Usage
from gateway_ext.openfaas import wire

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = (
    *("service", "image", "namespace", "envProcess", "envVars", "constraints", "secrets"),
    *("labels", "annotations", "limits", "requests", "readOnlyRootFilesystem"),
    *("replicas", "functionName", "name", "value", "rawValue", "alerts", "status"),
)
BODIES = st.dictionaries(st.sampled_from(NAMES), ANYTHING).map(
    lambda body: json.dumps({"service": "f", "image": "i", "name": "f"} | body).encode()
)
LABELS = st.dictionaries(st.sampled_from(["a", "com.openfaas.x", "b/c"]), st.text(max_size=5))


@given(BODIES | st.binary(max_size=20))
def test_whatever_is_sent_is_understood_or_refused(body: bytes) -> None:
    for read in (
        wire.deployment,
        wire.scaling,
        wire.alerts,
        lambda body: wire.function_to_remove(body, ""),
        lambda body: wire.secret(body, ""),
        lambda body: wire.namespace(body, ""),
    ):
        with suppress(BadRequest):
            read(body)


@given(
    st.builds(
        FunctionStatus,
        deployment=st.builds(
            Deployment,
            id=st.just(FunctionId("team", "f")),
            image=st.text(min_size=1, max_size=5),
            process=st.text(max_size=5),
            environment=LABELS,
            constraints=st.lists(st.text(max_size=3), max_size=2).map(tuple),
            secrets=st.lists(st.text(max_size=3), max_size=2).map(tuple),
            labels=LABELS,
            annotations=LABELS,
            limits=st.none() | st.just(Resources("1Gi", "100m", "1")),
            requests=st.none() | st.just(Resources(memory="1Gi")),
            read_only=st.booleans(),
        ),
        replicas=st.integers(0, 9),
        available_replicas=st.integers(0, 9),
        created_at=st.datetimes(timezones=st.just(UTC)),
        usage=st.none() | st.builds(Usage, st.floats(0.5, 9), st.integers(1, 9)),
        trouble=st.text(max_size=5),
        template=st.text(max_size=5),
    )
)
def test_a_status_comes_through_both_ways_unchanged(status: FunctionStatus) -> None:
    shown = json.dumps(wire.status_json(status, 3.0)).encode()
    assert wire.status_of(json.loads(shown), "elsewhere") == status


def test_a_time_is_shown_in_utc_whatever_its_zone() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    assert wire.timestamp(at) == "2026-01-02T01:04:05Z"
    assert wire.time_of("2026-01-02T03:04:05+02:00") == at


def test_a_text_that_no_encoding_knows_is_still_shown() -> None:
    status = FunctionStatus(
        Deployment(FunctionId("team", "f"), "\ud800"), 1, 1, datetime(2026, 1, 1, tzinfo=UTC)
    )
    assert json.dumps(wire.status_json(status, 0))


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"nvidia.com/gpu": "1"}, Resources(gpu="1")),
        ({"amd.com/gpu": 2}, Resources(gpu="2")),
        ({"intel.com/gpu": "1", "memory": "1Gi"}, Resources(memory="1Gi", gpu="1")),
        ({"memory": "", "ephemeral-storage": "1Gi"}, None),
        ({}, None),
    ],
)
def test_gpus_of_any_maker_are_read(limits: dict[str, object], found: Resources | None) -> None:
    body = json.dumps({"service": "f", "image": "i", "limits": limits}).encode()
    assert wire.deployment(body).limits == found


def test_the_path_names_a_namespace_before_the_body_does() -> None:
    assert wire.namespace(b'{"name": "b"}', "a").name == "a"
    assert wire.namespace(b"", "a").name == "a"
    with pytest.raises(BadRequest, match="name is missing"):
        wire.namespace(b"", "")


@pytest.mark.parametrize("image", ["a\nb", "a\r", "a\x1b[2J", "a\u2028b", "a\x85"])
def test_image_with_a_control_character_is_refused(image: str) -> None:
    with pytest.raises(BadDeployment, match="control character"):
        wire.deployment(json.dumps({"service": "f", "image": image}).encode())


@pytest.mark.parametrize("name", ["", "a=b", "a\nb", "a\0", "a b", "\x1b", "naïve", "a\r"])
def test_variable_whose_name_no_provider_could_set_is_refused(name: str) -> None:
    sent = {"service": "f", "image": "i", "envVars": {name: "1"}}
    with pytest.raises(BadDeployment, match="envVars"):
        wire.deployment(json.dumps(sent).encode())
    sent = {"service": "f", "image": "i", "envVars": {"a-B_1.c": "two\nlines"}}
    wire.deployment(json.dumps(sent).encode())


def test_deployment_is_refused_when_a_number_that_nobody_reads_has_no_end() -> None:
    with pytest.raises(BadRequest, match="is not JSON: Number out of range"):
        wire.deployment(b'{"service": "f", "image": "i", "replicas": 1e400}')


@pytest.mark.parametrize("text", ["Infinity", "NaN", "1e999", "-1", "0.5", '"1"', "true", "[]"])
def test_replicas_are_a_number_that_can_be_counted(text: str) -> None:
    with pytest.raises(BadRequest, match=r"replicas must be|is not JSON"):
        wire.scaling(f'{{"replicas": {text}}}'.encode())


@pytest.mark.parametrize(
    "more", [{"image": "\ud800"}, {"envVars": {"a": "\udfff"}}, {"image": "a\0b"}]
)
def test_a_text_that_no_process_could_be_given_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"is not JSON|control character"):
        wire.deployment(json.dumps({"service": "f", "image": "i"} | more).encode())


@pytest.mark.parametrize(
    "body", [b'{"image": "\xed\xa0\x80"}', b'{"image": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_a_body_that_is_not_utf_8_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="is not JSON"):
        wire.deployment(body)


def test_a_value_that_is_no_base64_is_refused() -> None:
    for text in ("é", "a", "a b="):
        with pytest.raises(BadRequest, match="rawValue is not base64"):
            wire.secret(json.dumps({"name": "s", "rawValue": text}).encode(), "")
