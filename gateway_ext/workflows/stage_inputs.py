"""What a stage gets of the request and of the stages before it: as it is, or joined; pure."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.data_handles import node_of
from common.http.asgi import Header
from gateway_ext.bounded_json import read_json
from gateway_ext.calls.passed_headers import DATA, MOST_DATA
from gateway_ext.error_statuses import status_of
from gateway_ext.errors import BadRequest, GatewayError, TooLarge
from gateway_ext.workflows.conditions import JsonPath, Unmeetable, value_at
from gateway_ext.workflows.plan import REQUEST, PlannedStage

HANDLE_WISH = b"handle"
CONTENT_TYPE = b"content-type"
MOST_ELEMENTS = 256
_OK, _GARBAGE = 200, 502
_JSON = b"application/json"
JSON_TYPE: Header = (CONTENT_TYPE, _JSON)
# Of the request's headers, what the gateway writes itself for every stage, and what the client
# wants of the answer's form: it is not the client that reads the first stages' answers.
_NOT_FOR_STAGES = frozenset(
    {
        *(b"connection", b"content-length", b"expect", b"transfer-encoding", b"upgrade"),
        *(b"traceparent", b"tracestate", b"x-call-id", DATA),
        *(b"accept-encoding", b"range", b"if-match", b"if-modified-since", b"if-none-match"),
        *(b"if-range", b"if-unmodified-since"),
    }
)


@dataclass(slots=True)
class StageAnswer:
    """The whole answer of a stage, or the request, which has no status; `data` are its handles.

    Its JSON is decoded once, by `read`, and of that only what conditions compare is kept.
    """

    status: int | None
    body: bytes
    content_type: bytes = b""
    data: tuple[bytes, ...] = ()
    _values: Mapping[JsonPath, Any] = field(default_factory=dict, compare=False)
    _refusal: BadRequest | TooLarge | None = field(default=None, compare=False)

    @property
    def is_json(self) -> bool:
        kind = self.content_type.partition(b";")[0].strip().lower()
        return kind == _JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))

    def read(self, paths: Collection[JsonPath], most_bytes: int) -> None:
        """Decode the JSON of the body, if anybody wants it; errors come when it is used."""
        try:
            if paths or self.is_json:
                value = self._decoded(most_bytes)
                self._values = {path: value_at(value, path) for path in paths}
            elif len(self.body) > most_bytes:
                raise TooLarge(most_bytes, f"to be joined {self._name} is")
        except (BadRequest, TooLarge) as error:
            self._refusal = error

    def check(self) -> None:
        """Unmeetable if it is too large to be read, or is not JSON and says so."""
        if self._refusal is not None and (self.is_json or isinstance(self._refusal, TooLarge)):
            raise self._unmeetable(self._refusal)

    def at(self, path: JsonPath) -> Any:
        """What `read` found there; Unmeetable if the body is not JSON."""
        if self._refusal is not None:
            raise self._unmeetable(self._refusal)
        return self._values[path]

    def embedded(self) -> bytes:
        """The answer within JSON: its own JSON, which was read, or its text."""
        self.check()
        if self.is_json:
            return self.body
        try:
            return _encoded(self.body.decode())
        except UnicodeDecodeError as error:
            raise Unmeetable(
                f"{self._name} is neither JSON nor text, and cannot be joined: {error}"
            ) from error

    def elements(self, most_bytes: int) -> list[bytes]:
        """The elements of a JSON array, of a bounded number, each as JSON."""
        try:
            value = self._decoded(most_bytes)
            if not isinstance(value, list):
                raise BadRequest("what it is to be called for each element of is no array")
            if len(value) > MOST_ELEMENTS:
                raise BadRequest(f"it would be called for more than {MOST_ELEMENTS} elements")
            return [_encoded(item) for item in value]
        except (BadRequest, TooLarge) as error:
            raise self._unmeetable(error) from error

    @property
    def _name(self) -> str:
        return "the request" if self.status is None else "its answer"

    def _decoded(self, most_bytes: int) -> Any:
        return read_json(self.body, most_bytes, self._name)

    def _unmeetable(self, error: GatewayError) -> Unmeetable:
        status = status_of(error) if self.status is None else _GARBAGE
        return Unmeetable(str(error), status)


@dataclass(frozen=True, slots=True)
class WorkflowRequest:
    """A workflow's call as its client sent it; header names are in lower case."""

    call_id: str
    headers: Sequence[Header]
    query: bytes
    answer: StageAnswer
    wants_handle: bool = field(default=False)


class StageInput(NamedTuple):
    """The request that a stage gets."""

    headers: list[Header]
    query: bytes
    body: bytes


def workflow_request(
    call_id: str, headers: Iterable[Header], query: bytes, body: bytes
) -> WorkflowRequest:
    pairs = list(headers)
    listed = [item.strip() for name, value in pairs if name == DATA for item in value.split(b",")]
    kind = next((value for name, value in pairs if name == CONTENT_TYPE), b"")
    handles = tuple(item for item in listed if item != HANDLE_WISH)
    kept = [header for header in pairs if header[0] not in _NOT_FOR_STAGES]
    answer = StageAnswer(None, body, kind, handles)
    return WorkflowRequest(call_id, kept, query, answer, HANDLE_WISH in listed)


def stage_input(
    stage: PlannedStage,
    request: WorkflowRequest,
    answers: Mapping[str, StageAnswer],
    *,
    wants_handle: bool,
) -> StageInput:
    """The input of a stage; skipped sources are missing in `answers`.

    One source is passed on as it is. Several are joined: a JSON object with a field for each that
    was not skipped. The handles of data of all sources go along.
    """
    given = {source: answers[source] for source in stage.sources if source in answers}
    handles = dict.fromkeys(handle for answer in given.values() for handle in answer.data)
    listed = [*handles, HANDLE_WISH] if wants_handle or stage.by_handle else [*handles]
    data: list[Header] = [(DATA, b", ".join(listed))] if listed else []
    if stage.sources == (REQUEST,):
        return StageInput([*request.headers, *data], request.query, request.answer.body)
    forwarded = [header for header in request.headers if header[0].startswith(b"x-forwarded-")]
    if len(stage.sources) == 1:
        (only,) = given.values()
        kind = [(CONTENT_TYPE, only.content_type)] if only.content_type else []
        return StageInput([*forwarded, *kind, *data], b"", only.body)
    return StageInput([*forwarded, JSON_TYPE, *data], b"", joined(given))


def joined(answers: Mapping[str, StageAnswer]) -> bytes:
    """A JSON object with the answer of each stage; Unmeetable names the one that has none."""
    parts = []
    for name, answer in answers.items():
        try:
            parts.append(json.dumps(name).encode() + b":" + answer.embedded())
        except Unmeetable as error:
            raise Unmeetable(f"{name}: {error}") from error
    return b"{" + b",".join(parts) + b"}"


def each_input(
    sent: StageInput, status: int | None, most_bytes: int, *, passes_handles: bool = False
) -> list[StageInput]:
    """The input of each call of a stage that is called for each element of its input.

    `status` is that of the answer which is its input, None of the request. A stage that
    `passes_handles` has a handle of each answer, which the next one gets in a header.
    """
    bodies = StageAnswer(status, sent.body).elements(most_bytes)
    if passes_handles and len(bodies) > MOST_DATA:
        count = len(bodies)
        raise Unmeetable(f"of {count} elements it would pass on more than {MOST_DATA} handles")
    kept = [header for header in sent.headers if header[0] != CONTENT_TYPE]
    return [StageInput([*kept, JSON_TYPE], sent.query, body) for body in bodies]


def listed(answers: Sequence[StageAnswer]) -> StageAnswer:
    """The answers as one JSON array, in the order of the elements."""
    body = b"[" + b",".join(answer.embedded() for answer in answers) + b"]"
    data = dict.fromkeys(handle for answer in answers for handle in answer.data)
    return StageAnswer(_OK, body, _JSON, tuple(data))


def stage_answer(status: int, headers: Iterable[Header], body: bytes) -> StageAnswer:
    """A stage's answer; Unmeetable if its headers say what no other stage could use."""
    pairs = list(headers)
    kind = next((value for name, value in pairs if name == CONTENT_TYPE), b"")
    encoding = next((value for name, value in pairs if name == b"content-encoding"), b"")
    if encoding and encoding.lower() != b"identity":
        raise Unmeetable(f"its answer is encoded: {encoding[:40].decode('latin-1')}")
    return StageAnswer(status, body, kind, _handles_in(pairs))


def _encoded(item: Any) -> bytes:
    try:
        text = json.dumps(item, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise BadRequest("an element is nested too deep") from error
    # Half a pair of surrogates is no UTF-8: its escape is that of JSON.
    return text.encode("utf-8", "backslashreplace")


def _handles_in(headers: Iterable[Header]) -> tuple[bytes, ...]:
    handles = [
        item.strip() for name, value in headers if name == DATA for item in value.split(b",")
    ]
    for handle in handles:
        if node_of(handle.decode("latin-1")) is None:
            raise Unmeetable("its X-Gpu-Data is no handle of data")
    return tuple(handles)
