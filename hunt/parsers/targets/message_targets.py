"""What gateways keep in streams and tables, and workflows: jobs, results, files, conditions."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from gateway_ext.jobs.values import AsyncCall, CallResult, JobKind, JobLane, JobNumber
from gateway_ext.model import FunctionId
from gateway_ext.shared_jobs import bodies, records, store
from gateway_ext.shared_jobs.records import JobRecord, RecordState, StoredParts
from gateway_ext.shared_jobs.session import GatewayPresence, beat
from gateway_ext.workflows import stage_inputs
from gateway_ext.workflows.conditions import BadCondition, Condition, Unmeetable, condition
from gateway_ext.workflows.errors import BadWorkflowFile
from gateway_ext.workflows.plan import read_workflow
from gateway_ext.workflows.stage_inputs import StageAnswer, StageInput
from hunt.parsers.parser_target import InputForm, Target

_FUNCTION = FunctionId("openfaas-fn", "f")
_GATEWAYS = "gateways, whoever may write to the stream"
_MESSAGE = "1 MiB, NATS's own bound on a message"
_RECORDS = (
    "gateway_ext/shared_jobs/bodies.py",
    "gateway_ext/shared_jobs/records.py",
    "gateway_ext/jobs/values.py",
)
_HEADERS = ((b"content-type", b"text/plain"), (b"x-a", b"\xff"))
_WORKFLOW = """\
workflow: vision
namespace: openfaas-fn
slo_ms: 500
timeout_ms: 30000
stages:
  detect: {function: detect, retries: 2, backoff_ms: 50}
  crop:
    function: crop.openfaas-fn
    after: [detect]
    when: detect.status == 200 and detect.json.found[0].sure > 0.5
    optional: true
  classify:
    function: classify
    after: crop
    by_handle: true
    timeout_ms: 1000
  each: {function: f, after: [crop, detect], each: true}
"""
_CONDITIONS = (
    'detect.status == 200 and detect.json.found[0].sure > 0.5 or crop.json["a b"] != "x\\u00e9"',
    "detect.json.a.b[3] >= -1.5e3",
    "crop.json == null and detect.json.x == true",
)
_JSON_BYTES = 1 << 20
_JSON_ANSWER = {"found": [{"sure": 0.75}], "a": {"b": [1, 2, 3, 4]}, "x": True, "a b": "x"}


def targets() -> list[Target]:
    """All of this file."""
    return [*_jobs(), _heartbeat(), *_workflows(), _condition(), *_stages()]


def _jobs() -> list[Target]:
    call = StoredParts(4, (5, 6), 2000)
    record = JobRecord(
        number=JobNumber(3), function=_FUNCTION, call_id="id", queued_at_s=1.5, call=call,
        state=RecordState.CLAIMED, lane=JobLane(JobKind.CALLBACK, "h:80"), due_at_s=2.5,
        owner="session", ended="token", attempts=2, deferrals=1, why="why",
        result=StoredParts(9, (), 7, "result"), failed=True,
    )  # fmt: skip
    asked = AsyncCall("id", _FUNCTION, "POST", b"/a\xff", b"b=1", _HEADERS, 1.5, "http://h/")
    result = CallResult(200, _HEADERS, 0.25, "it failed")
    kept: list[tuple[str, Callable[[bytes], Any], Callable[[Any], bytes], bytes]] = [
        (
            "job-record",
            lambda data: _usable(records.decode(data)),
            records.encode,
            records.encode(record),
        ),
        (
            "job-call",
            bodies.CALL_HEAD.decode,
            bodies.encode_head,
            bodies.encode_head((asked, b"abc")),
        ),
        (
            "job-result",
            bodies.RESULT_HEAD.decode,
            bodies.encode_head,
            bodies.encode_head((result, b"abc")),
        ),
    ]
    return [
        Target(
            name, decode, (ValueError, RecursionError), lambda seed=seed: [seed],  # type: ignore[misc] # bound now
            InputForm.JSON if name == "job-record" else InputForm.MSGPACK, _RECORDS,
            _GATEWAYS, _MESSAGE, encode=encode,
        )
        for name, decode, encode, seed in kept
    ]  # fmt: skip


def _usable(record: JobRecord) -> JobRecord:
    """The record, whose fields are of the kinds that the index of all jobs compares and adds."""
    times = record.queued_at_s, record.due_at_s, record.died_at_s
    numbers = record.number, record.attempts, record.deferrals, record.last_status, record.call.head
    texts = record.call_id, record.lane.key, record.owner, record.ended, record.why
    assert all(type(each) in (int, float) and abs(each) < 1e15 for each in times)
    assert all(isinstance(each, int) for each in numbers)
    assert all(isinstance(each, str) for each in (*texts, *record.function))
    return replace(record, why=record.why[:100])  # no more than a record keeps


def _heartbeat() -> Target:
    def receive(data: bytes) -> str:
        presence = GatewayPresence(30.0, lambda: 0.0)
        presence.receive("g", 1, data, 0.0)
        return presence.session_of("g")

    return Target(
        "gateway-heartbeat", receive, (ValueError,),
        lambda: [beat("session")], InputForm.JSON,
        ("gateway_ext/shared_jobs/session.py",), _GATEWAYS, _MESSAGE,
        encode=beat,
    )  # fmt: skip


def _workflows() -> list[Target]:
    return [
        Target(
            "workflow-message", store.decode, (ValueError,),
            lambda: [store.encode(_WORKFLOW), store.encode(None)],
            InputForm.JSON, ("gateway_ext/shared_jobs/store.py",),
            _GATEWAYS, _MESSAGE, encode=store.encode,
        ),
        Target(
            "workflow-file", lambda data: read_workflow(data.decode("utf-8", "replace")),
            (BadWorkflowFile,), lambda: [_WORKFLOW.encode()], InputForm.TEXT,
            ("gateway_ext/workflows/plan.py",
             "gateway_ext/workflows/yaml_lines.py"),
            "clients with the gateway's password",
            "64 KiB; 4,000 values, nested 8 deep, no aliases", memory_factor=600, cpu_s=3.0,
        ),
    ]  # fmt: skip


def _condition() -> Target:
    def meets(data: bytes) -> bool | None:
        found = condition(data.decode("utf-8", "replace"), ("detect", "crop"))
        answer = _answer(json.dumps(_JSON_ANSWER).encode(), [found])
        try:
            return found.holds({"detect": answer, "crop": answer})
        except Unmeetable:
            return None

    return Target(
        "workflow-condition", meets, (BadCondition,),
        lambda: [text.encode() for text in _CONDITIONS], InputForm.TEXT,
        ("gateway_ext/workflows/conditions.py",), "clients with the gateway's password",
        "1,000 characters, 32 comparisons",
    )  # fmt: skip


def _answer(data: bytes, conditions: Iterable[Condition]) -> StageAnswer:
    """An answer that was read for these conditions."""
    answer = StageAnswer(200, data, b"application/json")
    sources = ("detect", "crop")
    answer.read(
        {path for each in conditions for name in sources for path in each.paths(name)}, _JSON_BYTES
    )
    return answer


def _stages() -> list[Target]:
    """Answers of a workflow's stages: asked by conditions, passed on element by element, joined."""
    conditions = [condition(text, ("detect", "crop")) for text in _CONDITIONS]

    def asked(data: bytes) -> None:
        answer = _answer(data, conditions)
        for each in conditions:
            try:
                each.holds({"detect": answer, "crop": answer})
            except Unmeetable:
                continue

    def passed_on(data: bytes) -> list[StageInput]:
        joined = stage_inputs.joined({"a": _answer(data, [])})
        assert json.loads(joined) == {"a": json.loads(data)}
        return stage_inputs.each_input(StageInput([], b"", data), 200, _JSON_BYTES)

    def encode(found: list[StageInput]) -> bytes:
        return b"[" + b",".join(each.body for each in found) + b"]"

    seeds = [b'[1, "a", {"b": [null, 2.5]}]', json.dumps(_JSON_ANSWER).encode()]
    reads = ("gateway_ext/workflows/stage_inputs.py", "gateway_ext/bounded_json.py")
    who, bound = "functions, as stages of a workflow", "1 MiB, by a setting; 100,000 elements"
    return [
        Target(
            "stage-answer", asked, (), lambda: seeds, InputForm.JSON, reads, who, bound,
            memory_factor=300,
        ),
        Target(
            "stage-elements", passed_on, (Unmeetable,), lambda: seeds, InputForm.JSON, reads, who,
            bound, encode=encode, memory_factor=300,
        ),
    ]  # fmt: skip
