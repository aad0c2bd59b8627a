"""Every route below /system, with the statuses that OpenFaaS's programs expect."""

import asyncio
import json
from base64 import b64encode
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common import build_identity
from gateway_ext.model import FunctionId, Namespace
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.worlds.gateway_world import NOBODY, Said, World, gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

DEPLOYMENT = {
    "service": "f",
    "image": "registry/f:1",
    "namespace": "openfaas-fn",
    "envProcess": "python x",
    "envVars": {"a": "1"},
    "constraints": ["zone=a"],
    "secrets": ["s"],
    "labels": {"com.openfaas.scale.max": "3"},
    "annotations": {"com.gpufaas.batch": "2"},
    "limits": {"memory": "128Mi", "nvidia.com/gpu": "1"},
    "requests": {"cpu": "100m"},
    "readOnlyRootFilesystem": True,
}
SHOWN = {
    **{key: value for key, value in DEPLOYMENT.items() if key != "service"},
    "name": "f",
    "labels": {"com.openfaas.scale.max": "3", "faas_function": "f"},
    "invocationCount": 0,
    "replicas": 1,
    "availableReplicas": 0,
    "createdAt": "2026-01-02T03:04:05Z",
}


def text_of(result: Said, status: int) -> str:
    """What is wrong: always plain text."""
    assert result.status == status, result
    assert result.headers["content-type"].startswith("text/plain")
    return str(result.body)


async def test_functions_is_an_empty_list_when_there_is_none(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        result = await world.get("/system/functions")
        assert (result.status, result.body) == (200, [])


async def test_a_function_is_shown_as_it_was_deployed(tmp_path: Path) -> None:
    provider = MemoryProvider()
    provider.known_secrets["openfaas-fn", "s"] = b"x"
    async with gateway_world(tmp_path, provider) as world:
        assert (await world.ask("POST", "/system/functions", DEPLOYMENT)).status == 202
        assert (await world.get("/system/functions?namespace=openfaas-fn")).body == [SHOWN]
        assert (await world.get("/system/function/f")).body == SHOWN
        assert (await world.get("/system/function/f.openfaas-fn")).body == SHOWN
        result = (await world.get("/system/function/f?namespace=openfaas-fn&usage=1")).body
        assert result["usage"] == {"cpu": 12.5, "totalMemoryBytes": 1024}


async def test_labels_and_annotations_are_never_null(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        nulls = {"labels": None, "annotations": None, "envVars": None, "limits": None}
        assert (await world.deploy("f", **nulls)).status == 202
        [result] = (await world.get("/system/functions")).body
        assert result["labels"] == {"faas_function": "f"}
        assert result["annotations"] == {}
        assert not {"envVars", "limits", "requests", "usage", "secrets"} & set(result)


async def test_what_is_wrong_with_a_function_is_shown_and_not_taken_back(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        provider.running[FunctionId("openfaas-fn", "f")].trouble = "exited with 1"
        shown = (await world.get("/system/function/f")).body
        assert shown["annotations"] == {"com.gpufaas.trouble": "exited with 1"}
        again = await world.ask("PUT", "/system/functions", shown | {"service": "f"})
        assert again.status == 202
        deployed = provider.running[FunctionId("openfaas-fn", "f")].deployment
        assert (deployed.annotations, deployed.labels) == ({}, {})


async def test_list_has_no_replica_of_a_function_that_does_not_start(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        provider.spoil(FunctionId("openfaas-fn", "f"), "exited with 1")
        (listed,) = (await world.get("/system/functions")).body  # faas-cli shows its `replicas`
        shown = (await world.get("/system/function/f")).body
        assert (listed["replicas"], listed["availableReplicas"]) == (0, 0)
        assert (shown["replicas"], shown["availableReplicas"]) == (1, 0)


async def test_state_of_a_template_is_no_annotation(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        provider.running[FunctionId("openfaas-fn", "f")].template = "warm"
        shown = (await world.get("/system/function/f")).body
        assert (shown["annotations"], shown["template"]) == ({}, "warm")


async def test_faas_cli_deploys_by_put_then_post(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        body = {"service": "f", "image": "i"}
        assert "f is not deployed" in text_of(
            await world.ask("PUT", "/system/functions", body), 404
        )
        assert (await world.ask("POST", "/system/functions", body)).status == 202
        assert (await world.ask("PUT", "/system/functions", body)).status == 202


NONSENSE: tuple[tuple[Any, str], ...] = (
    (b"{", "the body is not JSON"),
    (b"[]", "must be a JSON object"),
    (b"[" * 100_000, "the body is not JSON"),
    ({"image": "i"}, "service is missing"),
    ({"service": "f"}, "image is missing"),
    ({"service": 1, "image": "i"}, "service must be a text, got `int`"),
    ({"service": "a.b", "image": "i"}, "may not contain a dot"),
    ({"service": "a/b", "image": "i"}, "may have letters, digits"),
    ({"service": "f", "image": "i", "namespace": "a.b"}, "namespace name 'a.b'"),
    ({"service": "f", "image": "i", "envVars": {"a": 1}}, "envVars[...] must be a text"),
    ({"service": "f", "image": "i", "envVars": {"a=b": "1"}}, "'a=b' cannot be set"),
    ({"service": "f", "image": "i", "labels": ["a"]}, "labels must be a mapping"),
    ({"service": "f", "image": "i", "secrets": ["../x"]}, "secret name '../x'"),
    ({"service": "f", "image": "i", "constraints": "x"}, "constraints must be a list"),
    ({"service": "f", "image": "i", "limits": {"memory": "lots"}}, "limits.memory: 'lots'"),
    ({"service": "f", "image": "i", "limits": {"cpu": 1}}, "limits.cpu must be a text"),
    ({"service": "f", "image": "i", "readOnlyRootFilesystem": "y"}, "must be true or false"),
    (
        {"service": "f", "image": "i", "annotations": {"com.gpufaas.slo": "soon"}},
        "com.gpufaas.slo: 'soon': a duration",
    ),
    (
        {"service": "f", "image": "i", "labels": {"com.openfaas.scale.min": "9999"}},
        "9999 replicas are more than the 1000",
    ),
)


async def test_a_deployment_that_makes_no_sense_is_refused_with_the_reason(tmp_path: Path) -> None:
    wrong = []
    async with gateway_world(tmp_path) as world:
        for (body, why), method in product(NONSENSE, ("POST", "PUT")):
            result = await world.ask(method, "/system/functions", body)
            deployed = (await world.get("/system/functions")).body
            is_text = result.headers.get("content-type", "").startswith("text/plain")
            if result.status != 400 or not is_text or why not in result.body or deployed != []:
                wrong.append((method, str(body)[:200], result, deployed))
    assert wrong == []


async def test_unknown_fields_are_passed_over_and_case_does_not_matter(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        body = {"Service": "f", "IMAGE": "i", "network": 5, "registryAuth": ["x"]}
        assert (await world.ask("POST", "/system/functions", body)).status == 202


async def test_a_body_that_is_chunked_is_read(tmp_path: Path) -> None:
    async def parts() -> Any:
        for byte in json.dumps({"service": "f", "image": "i"}).encode():
            yield bytes([byte])

    async with gateway_world(tmp_path) as world:
        url = f"{world.gateway.url}/system/functions"
        credentials = world.gateway.credentials
        assert credentials is not None
        headers = {"Authorization": credentials.header}
        async with world.session.post(url, data=parts(), headers=headers) as answer:
            assert answer.status == 202


async def test_a_description_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        text_of(await world.ask("POST", "/system/functions", b" " * ((4 << 20) + 1)), 413)


async def test_a_function_is_removed_once(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        await world.deploy("f")
        body = {"functionName": "f"}
        assert (await world.ask("DELETE", "/system/functions", body)).status == 202
        text_of(await world.ask("DELETE", "/system/functions", body), 404)
        text_of(await world.ask("DELETE", "/system/functions", {}), 400)
        text_of(await world.get("/system/function/f"), 404)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/system/scale-function/f?namespace=team", {"serviceName": "f", "replicas": 3}),
        ("/system/scale-function/f", {"serviceName": "f", "replicas": 3, "namespace": "team"}),
        ("/system/scale-function/f.team", {"serviceName": "f.team", "replicas": 3}),
    ],
)
async def test_scaling_reads_the_namespace_wherever_it_stands(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    provider = MemoryProvider()
    provider.known_namespaces["team"] = Namespace("team")
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f", namespace="team")
        assert (await world.ask("POST", path, body)).status == 202
        assert provider.scalings == [(FunctionId("team", "f"), 3)]


@pytest.mark.parametrize(
    ("replicas", "why"),
    [(None, "replicas is missing"), (-1, "whole number"), ("2", "whole number"),
     (1.5, "whole number"), (True, "whole number"), (1001, "more than the 1000")],
)  # fmt: skip
async def test_replicas_that_make_no_sense_are_refused(
    replicas: Any, why: str, tmp_path: Path
) -> None:
    async with gateway_world(tmp_path) as world:
        await world.deploy("f")
        body = {"replicas": replicas}
        assert why in text_of(await world.ask("POST", "/system/scale-function/f", body), 400)


async def test_scaling_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        text_of(await world.ask("POST", "/system/scale-function/f", {"replicas": 1}), 404)


async def test_info_is_nested_for_faas_cli_and_flat_for_a_gateway(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        nested = (await world.get("/system/info")).body
    async with gateway_world(tmp_path, role="provider") as world:
        flat = (await world.get("/system/info")).body
    release, sha = build_identity.release(), build_identity.commit()
    version = {"sha": sha, "release": release, "commit_message": ""}
    assert flat == {"provider": "gpufaas", "version": version, "orchestration": "memory"}
    assert nested == {"provider": flat, "version": version, "arch": nested["arch"]}


async def test_secrets_are_made_changed_and_removed(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:

        async def ask(method: str, **more: str) -> int:
            body = {"name": "s.key", "namespace": "openfaas-fn"} | more
            return (await world.ask(method, "/system/secrets", body)).status

        assert (await world.get("/system/secrets")).body == []
        assert await ask("PUT", value="x") == 404
        assert await ask("DELETE") == 404
        assert await ask("POST", value="eins") == 202
        assert await ask("POST", value="x") == 409
        assert provider.known_secrets["openfaas-fn", "s.key"] == b"eins"
        assert await ask("PUT", rawValue=b64encode(b"\xff\0").decode()) == 202
        assert provider.known_secrets["openfaas-fn", "s.key"] == b"\xff\0"
        result = await world.get("/system/secrets?namespace=openfaas-fn")
        assert result.body == [{"name": "s.key", "namespace": "openfaas-fn"}]
        assert await ask("DELETE") == 202
        assert await ask("POST", rawValue="not base64!") == 400
        assert await ask("POST", name="../s") == 400


async def test_a_secret_that_is_in_use_stays(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        await world.ask("POST", "/system/secrets", {"name": "s", "value": "x"})
        await world.deploy("f", secrets=["s"])
        result = await world.ask("DELETE", "/system/secrets", {"name": "s"})
        assert "used by f.openfaas-fn" in text_of(result, 409)


async def test_namespaces_are_made_changed_and_removed(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        made = {"name": "team", "labels": {"a": "1"}, "annotations": {"openfaas": "1"}}
        assert (await world.get("/system/namespaces")).body == ["openfaas-fn"]
        assert (await world.ask("POST", "/system/namespace/", made)).status == 201
        text_of(await world.ask("POST", "/system/namespace/team", made), 409)
        assert (await world.get("/system/namespaces")).body == ["openfaas-fn", "team"]
        assert (await world.get("/system/namespace/team")).body == made
        changed = {"labels": {"b": "2"}}
        assert (await world.ask("PUT", "/system/namespace/team", changed)).status == 202
        assert (await world.get("/system/namespace/team")).body == changed | {
            "name": "team",
            "annotations": {},
        }
        assert (await world.deploy("f", namespace="team")).status == 202
        assert (await world.ask("DELETE", "/system/namespace/team")).status == 202
        text_of(await world.get("/system/namespace/team"), 404)
        text_of(await world.ask("DELETE", "/system/namespace/team"), 404)
        text_of(await world.ask("PUT", "/system/namespace/team", {}), 404)
        text_of(await world.ask("POST", "/system/namespace/", {"name": "a.b"}), 400)
        text_of(await world.ask("DELETE", "/system/namespace/openfaas-fn"), 400)


async def test_an_alert_scales_by_a_part_of_the_maximum_and_back(tmp_path: Path) -> None:
    provider = MemoryProvider()
    labels = {"com.openfaas.scale.min": "2", "com.openfaas.scale.max": "10"}
    function = FunctionId("openfaas-fn", "f")
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f", labels=labels | {"com.openfaas.scale.factor": "30"})
        for status in ("firing", "firing", "firing", "firing", "resolved", "resolved"):
            result = await world.ask("POST", "/system/alert", alert("f.openfaas-fn", status))
            assert result.status == 200
    assert provider.scalings == [(function, replicas) for replicas in (4, 7, 10, 2)]


async def test_an_alert_that_fails_does_not_silence_the_others(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        both = alert("absent", "firing", "f", "firing")
        assert "absent" in text_of(await world.ask("POST", "/system/alert", both), 500)
        assert provider.scalings == [(FunctionId("openfaas-fn", "f"), 2)]
        text_of(await world.ask("POST", "/system/alert", {"alerts": [{"labels": 1}]}), 400)


async def test_alert_with_a_bad_name_is_refused_after_the_others_were_applied(
    tmp_path: Path,
) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        bad = await world.ask("POST", "/system/alert", alert("a b\x1b", "firing", "f", "firing"))
        assert text_of(bad, 400) == (
            r"a b?: the function name 'a b\x1b' may have letters, digits, - and _ only"
        )
        nameless = {"alerts": [{"labels": {}, "status": "firing"}]}
        said = text_of(await world.ask("POST", "/system/alert", nameless), 400)
        assert said == "no function_name: the function's name is missing"
        both = alert("absent", "firing", "a b", "firing")
        text_of(await world.ask("POST", "/system/alert", both), 500)
    assert provider.scalings == [(FunctionId("openfaas-fn", "f"), 2)]


async def test_refusal_has_no_control_characters_of_the_path(tmp_path: Path) -> None:
    sent = "%1b[31m%0a%c2%9b%00"
    async with gateway_world(tmp_path) as world:
        for path in (
            *("/", "/function/", "/workflow/", "/system/", "/system/function/", "/system/job/"),
            *("/system/namespace/", "/system/workflow/", "/system/function/f.", "/ui/"),
            *("/system/function/" + "x" * 80, "/system/function/f?namespace=", "/system/traces/"),
            *("/system/workflows?namespace=", "/system/functions?namespace="),
            *("/system/function/f.openfaas-fn?namespace=", "/system/secrets?namespace="),
        ):
            said = await world.ask("GET", path + sent)
            assert said.status in {400, 404}, path
            assert str(said.body).isprintable(), path
        for path in ("/function/", "/async-function/", "/workflow/", "/async-workflow/"):
            said = await world.ask("POST", path + sent, b"")
            assert said.status in {400, 404}, path
            assert str(said.body).isprintable(), path


def alert(*result: str) -> dict[str, Any]:
    """What Prometheus's alert manager posts: pairs of a function and a status."""
    pairs = zip(result[::2], result[1::2], strict=True)
    alerts = [
        {"status": status, "labels": {"alertname": "high", "function_name": function}}
        for function, status in pairs
    ]
    return {"receiver": "scale-up", "status": "firing", "alerts": alerts}


async def test_a_wrong_method_or_path_is_reported(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        wrong = await world.ask("PATCH", "/system/functions")
        assert "PATCH /system/functions" in text_of(wrong, 405)
        assert "DELETE" in wrong.headers["allow"]
        text_of(await world.get("/system/telemetry"), 404)
        text_of(await world.get("/nothing"), 404)


async def test_a_target_that_is_no_path_is_not_found(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        reader, writer = await asyncio.open_connection(*world.gateway.address)
        writer.write(b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 404 " in await reader.readline()
        writer.close()


async def _unauthorized(world: World, method: str, path: str, **more: Any) -> None:
    result = await world.ask(method, path, **{"who": NOBODY} | more)
    assert text_of(result, 401) == "invalid credentials"
    assert result.headers["www-authenticate"] == 'Basic realm="Restricted"'


async def test_everything_below_system_requires_credentials(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        for method, path in (
            ("GET", "/system/functions"),
            ("POST", "/system/functions"),
            ("GET", "/system/logs?name=f"),
            ("GET", "/system/jobs"),
            ("GET", "/system/nothing"),
            ("POST", "/system/alert"),
        ):
            await _unauthorized(world, method, path)
        for result in ("Basic", "Basic ===", "Bearer x", "Basic YWRtaW46eA=="):
            headers = {"Authorization": result}
            await _unauthorized(world, "GET", "/system/info", headers=headers)


async def test_no_credentials_are_required_when_auth_is_off(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, auth=False) as world:
        assert (await world.get("/system/info", who=NOBODY)).status == 200


async def test_metrics_require_the_password_when_that_is_set(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, metrics_auth=True) as world:
        assert (await world.get("/metrics", who=NOBODY)).status == 401
        assert (await world.get("/metrics")).status == 200
        assert (await world.get("/healthz", who=NOBODY)).status == 200


async def test_health_and_metrics_are_open(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        assert (await world.get("/healthz", who=NOBODY)).body == ""
        assert (await world.ask("HEAD", "/healthz", who=NOBODY)).status == 200
        assert (await world.get("/readyz", who=NOBODY)).status == 200
        assert "gpufaas" in (await world.get("/", who=NOBODY)).body
        await world.get("/system/function/secret-name")
        metrics = (await world.get("/metrics", who=NOBODY)).body
        labels = 'code="404",method="GET",path="/system/function"'
        assert f"provider_http_requests_total{{{labels}}} 1.0" in metrics
        assert "provider_http_request_duration_seconds_count" in metrics
        assert "secret-name" not in metrics
        text_of(await world.ask("POST", "/healthz", who=NOBODY), 405)
