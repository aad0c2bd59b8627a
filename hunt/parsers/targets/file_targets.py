"""Files and lines that others wrote: settings, traces, weights on disk, what a gateway kept."""

import asyncio
import atexit
import functools
import json
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.base_protocol import BaseProtocol

from cache_manager.model.errors import CacheError
from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId, Namespace, Resources
from gateway_ext.providers.docker import engine as docker_engine
from gateway_ext.providers.docker.engine import OutputFrames
from gateway_ext.providers.docker.images import credentials_for
from gateway_ext.providers.managed import logs
from gateway_ext.providers.managed.provider import NamespaceFile
from gateway_ext.providers.process.builds import BuildRecord, BuildStore
from gateway_ext.providers.upstream.provider import ExtrasFile
from gateway_ext.runtime.template.example_calls import FILE, BadExample, examples_in
from gateway_ext.runtime.template.fork_line import ForkReport, OrderLine, TemplateBroken
from gpu_manager.errors import WeightsChanged
from gpu_manager.runtimes.stream import ProcessBreaks
from gpu_manager.weights import spill_directory
from gpufaas.errors import CommandError
from gpufaas.options.configuration import read_settings
from gpufaas.remote.http_request import http_url
from hunt.parsers.parser_target import InputForm, Target
from scheduler.model.errors import BadWorkload, SchedulerError
from scheduler.sim import model_catalogue, workload
from torch_shim.wire.image_digests import lay_out

_OPERATORS = "people"
_DIGEST = "0a" * 32
_TOML = """\
policy = "lalbo3"
eviction = "lru"
exit_rule = "never"
[parameters]
o3_limit = 25
[scheduler]
listen = "127.0.0.1:7700"
[etcd]
endpoints = ["http://127.0.0.1:2379"]
[gateway]
listen = ":8080"
[node]
devices = "cpu:2"
gpu_memory = "8GiB"
[tracing]
ratio = 0.5
[billing]
write_s = 30.0
"""
_ENVIRONMENT = "GPUFAAS_POLICY=lb\nGPUFAAS_NODE_RUNTIME=stream\nGPUFAAS_TRACING_KEEP=5\n"
_TRACE = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\na,b,c,http,1,0,5\nd,e,f,timer,0,2,0\n"
_MODELS = "model,size_class,gpu_memory_mb,load_s,inference_s\nvgg,large,1500,2.5,0.1\n"
_LINE = b'{"status":"a","id":"b"}\n'
_MOST_LINE_BYTES = 1 << 12


def targets() -> list[Target]:
    """All of this file."""
    return [
        *_settings(),
        *_tables(),
        *_of_managers(),
        *_of_docker(),
        *_of_providers(),
        *_told(),
        _examples(),
    ]


@functools.cache
def _folder() -> Path:
    """A folder of this process for the files that parsers open themselves."""
    return Path(tempfile.mkdtemp(prefix="gpufaas-parsers-"))


def _as_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """A reader of a file, with the file's content as its input."""

    def parse(data: bytes) -> Any:
        path = _folder() / name
        path.write_bytes(data)
        return read(path)

    return parse


# -- settings and tables ---------------------------------------------------------------------------


def _settings() -> list[Target]:
    refusals = (CommandError, CacheError, SchedulerError)  # each is shown as one line

    def from_environment(data: bytes) -> Any:
        pairs = (line.partition("=") for line in data.decode("utf-8", "replace").splitlines())
        given = {name: value for name, _, value in pairs if name != "GPUFAAS_CONFIG"}
        return read_settings(None, given | {"GPUFAAS_CONFIG": os.devnull}, {})

    return [
        Target(
            "settings-file", _as_file("s.toml", lambda path: read_settings(str(path), {}, {})),
            refusals, lambda: [_TOML.encode(), b'exit_rule = "fixed:10"'], InputForm.TEXT,
            ("gpufaas/options/configuration.py",), _OPERATORS, "a file that a person named",
            memory_factor=2_000, cpu_s=5.0,
        ),
        Target(
            "settings-environment", from_environment, refusals, lambda: [_ENVIRONMENT.encode()],
            InputForm.TEXT, ("gpufaas/options/configuration.py",), _OPERATORS, "the environment",
        ),
        Target(
            "http-url", lambda data: http_url(data.decode("utf-8", "replace"), "it"),
            (CommandError,),
            lambda: [b"http://a:b%20@h:80/p?q", b"https://[::1]/", b"https://h"], InputForm.TEXT,
            ("gpufaas/remote/http_request.py",), _OPERATORS, "a flag or a variable",
        ),
    ]  # fmt: skip


def _tables() -> list[Target]:
    return [
        Target(
            "azure-trace", lambda data: workload.parse(data.decode("utf-8", "replace"), "it"),
            (BadWorkload,), lambda: [_TRACE.encode()], InputForm.TEXT,
            ("scheduler/sim/workload.py",), _OPERATORS, "a file that a person named",
            memory_factor=300,
        ),
        Target(
            "model-table", _as_file("m.csv", lambda path: model_catalogue.table1(str(path))),
            (BadWorkload,), lambda: [_MODELS.encode()], InputForm.TEXT,
            ("scheduler/sim/model_catalogue.py",), _OPERATORS, "a file that a person named",
            memory_factor=1_000,
        ),
    ]  # fmt: skip


# -- a GPU manager's files -------------------------------------------------------------------------


def _of_managers() -> list[Target]:
    ours = "managers of this machine, whoever may write to their folder"
    return [
        Target(
            "spilled-weights", _spilled, (WeightsChanged,), lambda: [_spill_header()],
            InputForm.BINARY, ("gpu_manager/weights/spill_directory.py",), ours,
            "a header of 100 MB, safetensors' own bound",
        ),
        Target(
            "process-breaks", _as_file("breaks.json", lambda path: ProcessBreaks(path)["m"]), (),
            lambda: [b'{"m": [2, 1.5e9], "n": [1, 9e9]}'], InputForm.JSON,
            ("gpu_manager/runtimes/stream.py",), ours, "4 MiB",
            memory_bytes=6 << 20,
        ),
    ]  # fmt: skip


def _spill_header() -> bytes:
    table = lay_out([5, 8])
    return spill_directory._header(_DIGEST, table) + b"\0" * 13  # noqa: SLF001 - what a directory writes


def _spilled(data: bytes) -> Any:
    descriptor = os.memfd_create("gpufaas-parsers")
    try:
        os.write(descriptor, data)
        return spill_directory._read_table(_DIGEST, descriptor)  # noqa: SLF001 - what a directory reads
    finally:
        os.close(descriptor)


# -- the Docker Engine -----------------------------------------------------------------------------


def _of_docker() -> list[Target]:
    engine = "the Docker Engine, and containers' output"
    entry = b"2025-01-02T03:04:05.123456789Z a line\n"
    framed = b"\x01\0\0\0" + len(entry).to_bytes(4, "big") + entry
    config = {"auths": {"r.example": {"auth": "YTpi"}, "s.example": {"identitytoken": "t"}}}

    def output(data: bytes) -> Any:
        frames = OutputFrames(_MOST_LINE_BYTES)
        half = len(data) // 2
        return frames.feed(data[:half]) + frames.feed(data[half:]) + frames.end()

    def credentials(path: Path) -> list[str]:
        return [
            credentials_for(f"{name}.example/i", path, "https://r.example/v1/") for name in "rs"
        ]

    return [
        Target(
            "docker-output", output, (), lambda: [framed + framed, b"\x02" + framed[1:]],
            InputForm.BINARY, ("gateway_ext/providers/docker/engine.py",), engine,
            "entries of 64 KiB; lines of the log's own bound", memory_factor=40,
        ),
        Target(
            "docker-lines", _engine_lines, (ProviderFailed,), lambda: [_LINE + b"\n" + _LINE],
            InputForm.JSON, ("gateway_ext/providers/docker/engine.py",), engine,
            "1 MiB a line",
        ),
        Target(
            "docker-refusal", docker_engine._message, (), lambda: [b'{"message": "no"}'],  # noqa: SLF001 - its caller needs an engine
            InputForm.JSON, ("gateway_ext/providers/docker/engine.py",), engine,
            "the whole answer",
        ),
        Target(
            "docker-credentials", _as_file("config.json", credentials), (ProviderFailed,),
            lambda: [json.dumps(config).encode()], InputForm.JSON,
            ("gateway_ext/providers/docker/images.py",),
            "people and `docker login`", "a file that a person named",
        ),
    ]  # fmt: skip


def _engine_lines(data: bytes) -> list[dict[str, Any]]:
    async def lines() -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        reader = aiohttp.StreamReader(_NoTransport(), 1 << 20, loop=loop)
        reader.feed_data(data)
        reader.feed_eof()
        return [each async for each in docker_engine.json_objects(reader)]

    return _runner().run(lines())


class _NoTransport(BaseProtocol):
    """What a reader pauses when it is full."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())


@functools.cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


# -- what a gateway kept ---------------------------------------------------------------------------


def _of_providers() -> list[Target]:
    ours = "this gateway, whoever may write to its folder"
    line = json.dumps(["2025-01-02T03:04:05+00:00", "i", "text"]).encode()
    namespaces = {"n": [{"a": "b"}, {}]}
    extras = {"functions": [{"namespace": "n", "name": "f", "labels": {"a": "b"}}]}
    function = FunctionId("n", "f")

    def opened(path: Path) -> list[Namespace]:
        kept = NamespaceFile(path)
        kept.open()
        return list(kept.all())

    return [
        Target(
            "namespaces-file", _as_file("namespaces.json", opened), (ProviderFailed,),
            lambda: [json.dumps(namespaces).encode()], InputForm.JSON,
            ("gateway_ext/providers/managed/provider.py",), ours, "a file of its own",
        ),
        Target(
            "extras-file", _as_file("extras.json", lambda path: ExtrasFile(path).functions()),
            (ProviderFailed,), lambda: [json.dumps(extras).encode()], InputForm.JSON,
            ("gateway_ext/providers/upstream/provider.py",), ours, "a file of its own",
        ),
        Target(
            "log-line", lambda data: logs._decoded(function, data), (), lambda: [line],  # noqa: SLF001 - of a whole file of lines
            InputForm.JSON, ("gateway_ext/providers/managed/logs.py",), ours,
            "a line of a file of its own",
        ),
        Target(
            "function-record", _records, (ProviderFailed,), lambda: [_record_file().read_bytes()],
            InputForm.JSON,
            ("gateway_ext/providers/managed/records.py",
             "gateway_ext/model.py",
             "gateway_ext/providers/process/builds.py"),
            ours, "a file of its own",
        ),
    ]  # fmt: skip


def _told() -> list[Target]:
    """What a template's process tells its gateway."""

    def report(data: bytes) -> ForkReport:
        with OrderLine() as line, line.theirs as theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.send(data or b"\0")
            return line.received("ready")

    return [
        Target(
            "template-report", report, (TemplateBroken,),
            lambda: [b'{"state": "ready", "why": "no reason"}'], InputForm.JSON,
            ("gateway_ext/runtime/template/fork_line.py",),
            "processes with functions' own code", "8 KiB", most_bytes=8 << 10,
        ),
    ]  # fmt: skip


def _record_file() -> Path:
    """A function's record, where the store of the process provider keeps it."""
    store = BuildStore(_folder() / "state")
    folder = store.functions_folder / "f.n.0a"
    folder.mkdir(parents=True, exist_ok=True)
    resources = Resources("1Mi", "1", "1")
    deployment = Deployment(FunctionId("n", "f"), "i", limits=resources, secrets=("s",))
    created_at = datetime.fromtimestamp(0, UTC)
    store.save(BuildRecord(deployment, folder, "b", created_at, 2, None))
    return folder / "record.json"


@functools.cache
def _record_path() -> Path:
    return _record_file()


def _records(data: bytes) -> list[BuildRecord]:
    path = _record_path()
    path.write_bytes(data)
    return list(BuildStore(_folder() / "state")._records())  # noqa: SLF001 - `open` takes the folder's lock


def _examples() -> Target:
    calls = [{"body": {"a": 1}, "method": "PUT", "path": "/x", "headers": {"a": "b"}}]
    coded = [{"body_base64": "YWI="}, {"body": "text"}]
    return Target(
        "example-calls", _as_file(FILE, lambda path: examples_in(path.parent)), (BadExample,),
        lambda: [json.dumps(calls + coded).encode(), json.dumps(coded[0]).encode()],
        InputForm.JSON, ("gateway_ext/runtime/template/example_calls.py",),
        "functions' authors, in the function's folder", "16 MiB",
    )  # fmt: skip
