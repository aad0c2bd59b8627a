"""Parts that need no Engine: bodies, frames of output, credentials, settings."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.errors import BadDeployment, BadRequest, ProviderFailed
from gateway_ext.model import Deployment, FunctionId, Resources
from gateway_ext.providers.docker import container_spec
from gateway_ext.providers.docker.container_spec import Release, ReleaseRecord
from gateway_ext.providers.docker.engine import (
    EngineClient,
    EngineImage,
    OutputFrames,
    OutputLine,
    ended_with,
)
from gateway_ext.providers.docker.images import credentials_for
from gateway_ext.providers.docker.provider import check_settings
from gateway_ext.providers.function_environment import injected_digest
from gateway_ext.providers.managed.records import RecordStore
from gateway_ext.settings import GatewaySettings

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
USUAL = "https://index.usual.io/v1/"
STAMP = b"2026-01-02T03:04:05.678901234Z "


def deployed(**how: Any) -> Deployment:
    return Deployment(FunctionId("openfaas-fn", "f"), how.pop("image", "reg:5/a/f:1"), **how)


def body(injected: dict[str, str] | None = None, volume: str = "", **how: Any) -> dict[str, Any]:
    settings = GatewaySettings(docker_gpu_mount=how.pop("gpu_mount", ""))
    release = Release("r1", deployed(**how), EngineImage("sha256:1", has_our_template=True), "")
    labels = {"com.gpufaas.gateway": "g"}
    return container_spec.container(release, settings, labels, injected or {}, volume, cores=4)


def frame(stream: int, content: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(content).to_bytes(4, "big") + content


def test_frames_are_lines_wherever_the_bytes_are_cut() -> None:
    stream = (
        frame(1, STAMP + b"one\n") + frame(2, STAMP + b"two \xff\n") + frame(1, STAMP + b"3\r\n")
    )
    for size in (1, 7, len(stream)):
        frames = OutputFrames(100)
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        lines = [line for part in parts for line in frames.feed(part)]
        assert lines == [OutputLine(AT, "one"), OutputLine(AT, "two �"), OutputLine(AT, "3")]


def test_parted_line_is_one_again() -> None:
    frames = OutputFrames(100)
    later = b"2026-01-02T03:04:06Z "
    assert frames.feed(frame(1, STAMP + b"be")) == []
    assert frames.feed(frame(2, STAMP + b"other\n")) == [OutputLine(AT, "other")]
    assert frames.feed(frame(1, later + b"gin\n")) == [OutputLine(AT, "begin")]
    frames.feed(frame(1, STAMP + b"no end"))
    assert frames.end() == [OutputLine(AT, "no end")]


def test_endless_line_is_cut() -> None:
    frames = OutputFrames(10)
    assert frames.feed(frame(1, STAMP + b"x" * 25)) == [OutputLine(AT, "x" * 10)]


def test_limits_and_requests_are_sent_in_the_engines_units() -> None:
    limits, requests = Resources("128Mi", "250m"), Resources("1Gi", "500m")
    host = body(limits=limits, requests=requests)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 128 << 20
    assert host["MemoryReservation"] == 128 << 20  # never above the limit
    assert (host["NanoCpus"], host["CpuShares"]) == (250_000_000, 512)


def test_limits_that_the_engine_does_not_take_are_the_nearest_that_it_takes() -> None:
    small = body(limits=Resources("5Mi", "1m"), requests=Resources("1", "1n"))["HostConfig"]
    assert small["Memory"] == small["MemorySwap"] == small["MemoryReservation"] == 6 << 20
    assert (small["NanoCpus"], small["CpuShares"]) == (10_000_000, 2)
    large = body(limits=Resources(cpu="64"), requests=Resources(cpu="1000"))
    assert large["HostConfig"]["NanoCpus"] == 4_000_000_000, "the Engine has four cores"
    assert large["HostConfig"]["CpuShares"] == 262_144
    assert "OMP_NUM_THREADS=4" in large["Env"]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"image": "../containers/json?"}, "no name of an image"),
        ({"image": ""}, "no name of an image"),
        ({"labels": {"a": "b" * (64 << 10)}}, "labels: 65537 bytes; 65536 are the most"),
    ],
)
def test_deployment_is_refused_when_no_container_can_be_made(how: Any, what: str) -> None:
    with pytest.raises(BadDeployment, match=what):
        container_spec.check(deployed(**how))


@pytest.mark.parametrize(
    "image", ["f", "f:1", "localhost:5000/a/b:1", "r.io/a/b@sha256:" + "0" * 64, "A/b_c.d:v-1"]
)
def test_names_of_images_are_taken(image: str) -> None:
    container_spec.check(deployed(image=image))


def test_temporary_files_are_in_memory_where_the_root_cannot_be_written() -> None:
    assert body(read_only=True)["HostConfig"]["Tmpfs"]["/tmp"].endswith("size=268435456")
    assert body()["HostConfig"]["Tmpfs"] == {}


def test_no_container_can_claim_to_be_another_gateways() -> None:
    with pytest.raises(BadDeployment, match=r"com\.gpufaas\.gateway is not known"):
        body(labels={"com.gpufaas.gateway": "mine"})
    found = body(labels={"team": "blue"})["Labels"]
    assert found["com.gpufaas.gateway"] == "g"
    assert found["team"] == "blue"
    assert found["com.gpufaas.function"] == "f.openfaas-fn"


def test_managers_socket_is_mounted_where_functions_look() -> None:
    injected = {"GPUFAAS_ADDRESS": "unix:/run/gpufaas/node.sock", "PYTHONPATH": "/x"}
    here = body(injected)["HostConfig"]["Mounts"]
    assert [(one["Type"], one["Source"], one["Target"]) for one in here] == [
        ("bind", "/run/gpufaas", "/run/gpufaas")
    ]
    volume = body(injected, gpu_mount="sockets")["HostConfig"]["Mounts"]
    assert [(one["Type"], one["Source"]) for one in volume] == [("volume", "sockets")]
    assert body({"GPUFAAS_ADDRESS": "tcp:h:1"})["HostConfig"]["Mounts"] == []
    assert not any(one.startswith("PYTHONPATH") for one in body(injected)["Env"])


def test_functions_own_variables_do_not_replace_ours() -> None:
    environment = {"GPUFAAS_CREDENTIAL": "stolen", "exec_timeout": "7s"}
    found = body({"GPUFAAS_CREDENTIAL": "c"}, environment=environment, process="run it")["Env"]
    assert "GPUFAAS_CREDENTIAL=c" in found
    assert "exec_timeout=7s" in found
    assert "fprocess=run it" in found


@pytest.mark.parametrize("injected", [{}, {"GPUFAAS_ENABLED": "1"}])
def test_function_has_no_gpu_of_the_machine_whatever_it_or_its_image_says(
    injected: dict[str, str],
) -> None:
    own = {"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all"}
    found = body(injected, environment=own)["Env"]
    visible = [variable for variable in found if "VISIBLE_DEVICES" in variable]
    assert sorted(visible) == ["CUDA_VISIBLE_DEVICES=", "NVIDIA_VISIBLE_DEVICES=void"]


def test_constraints_are_named_unless_they_ask_for_a_gpu() -> None:
    wanted = ("zone=a", "nvidia.com/gpu.product=T4")
    assert container_spec.ignored(deployed(constraints=wanted)) == ["zone=a"]


def test_memory_of_the_cluster_is_no_reason_for_another_release() -> None:
    one = {"GPUFAAS_ADDRESS": "a", "GPUFAAS_GPU_MEMORY": "1"}
    assert injected_digest(one) == injected_digest({**one, "GPUFAAS_GPU_MEMORY": "2"})
    assert injected_digest(one) != injected_digest({**one, "GPUFAAS_ADDRESS": "b"})


def config(folder: Path, auths: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": auths}))
    return path


def read(header: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(header))


def test_credentials_are_those_of_the_images_registry(tmp_path: Path) -> None:
    auth = base64.b64encode(b"me:pass:word").decode()
    path = config(tmp_path, {"r.io:5": {"auth": auth}, USUAL: {"auth": auth}})
    expected = {"username": "me", "password": "pass:word", "serveraddress": "r.io:5"}
    assert read(credentials_for("r.io:5/a/b:1", path, USUAL)) == expected
    for image in ("b", "a/b", "usual.io/a/b", "index.usual.io/b"):
        assert read(credentials_for(image, path, USUAL))["serveraddress"] == USUAL
    assert credentials_for("other.io/b", path, USUAL) == ""


@pytest.mark.parametrize(
    "entry", [{}, {"auth": "%"}, {"auth": base64.b64encode(b"me").decode()}, 3]
)
def test_credentials_that_cannot_be_read_are_reported(tmp_path: Path, entry: object) -> None:
    with pytest.raises(ProviderFailed, match=r"r\.io"):
        credentials_for("r.io/a", config(tmp_path, {"r.io": entry}), USUAL)


def test_credentials_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ProviderFailed, match=r"missing\.json"):
        credentials_for("r.io/a", tmp_path / "missing.json", USUAL)


@pytest.mark.parametrize(
    "wrong",
    [
        GatewaySettings(docker_name="a b"),
        GatewaySettings(docker_name=""),
        GatewaySettings(docker_network="-"),
        GatewaySettings(docker_pull="sometimes"),
    ],
)
def test_settings_are_refused_when_they_cannot_be(wrong: GatewaySettings) -> None:
    with pytest.raises(BadRequest):
        check_settings(wrong)


@pytest.mark.parametrize(
    "url", ["", "docker.sock", "unix://host/x", "http://x", "tcp://", "tcp://a/b"]
)
def test_url_is_refused_when_it_names_no_engine(url: str) -> None:
    with pytest.raises(BadRequest, match="docker_url"):
        EngineClient(url, "g")


@pytest.mark.parametrize(
    ("status", "error", "answer"),
    [
        ("0", "", "exited with status 0"),
        ("137", "", "was ended by SIGKILL"),
        ("127", "no", "127: no"),
    ],
)
def test_end_is_described_in_words(status: str, error: str, answer: str) -> None:
    assert answer in ended_with(status, error)


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, ReleaseRecord)
    assert store.open() == []
    deployment = deployed(limits=Resources("1Mi"), secrets=("a",), labels={"a": "b"})
    release = Release("r2", deployment, EngineImage("i", has_our_template=False), "x")
    before = Release("r1", deployed(), None, "")
    record = ReleaseRecord(release, before, store.new_folder(deployment.id), AT, 3)
    store.save(record)
    with pytest.raises(ProviderFailed, match="another gateway"):
        RecordStore(tmp_path, ReleaseRecord).open()
    store.give_back()
    found = RecordStore(tmp_path, ReleaseRecord)
    assert found.open() == [record]
    found.forget(record)
    found.give_back()
    assert found.open() == []
    found.give_back()
    assert not record.folder.exists()


def test_damaged_record_is_reported(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, ReleaseRecord)
    store.open()
    (store.new_folder(FunctionId("a", "b")) / "record.json").write_text("{")
    store.give_back()
    with pytest.raises(ProviderFailed, match=r"record\.json is damaged"):
        store.open()
    store.give_back()
