"""The calls of a bench as bytes, with a check of what was answered to each."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from bench.measure.load_figures import http_post
from bench.measure.peers.two_layers import FEATURES, scores, two_layers
from bench.measure.report import MeasurementFailed

_REQUESTS = 64
_OK_FROM, _OK_TO = 200, 300
# The systems compute the same in single precision, perhaps in another order.
_close = partial(math.isclose, rel_tol=1e-4, abs_tol=1e-5)

Answer = tuple[int, int, bytes]  # which call, its status, its body


@dataclass(frozen=True, slots=True)
class CallForm:
    """The JSON in which a system takes a call's numbers, and in which it answers with scores."""

    request: Callable[[list[float]], Any]
    scores: Callable[[Any], list[float]]


PLAIN_FORM = CallForm(lambda numbers: {"numbers": numbers}, lambda answer: answer["scores"])
# Of Triton and others: version 2 of KServe's protocol.
KSERVE_FORM = CallForm(
    lambda numbers: {"inputs": [_tensor("numbers", numbers)]},
    lambda answer: answer["outputs"][0]["data"],
)


def _tensor(name: str, numbers: list[float]) -> dict[str, object]:
    return {"name": name, "datatype": "FP32", "shape": [1, len(numbers)], "data": numbers}


@dataclass(frozen=True, slots=True)
class CheckedCalls:
    """Calls, and the scores that each must be answered with; none where any `hello` will do."""

    calls: list[bytes]
    expected: Sequence[Sequence[float]] = ()
    form: CallForm = PLAIN_FORM

    def check(self, answers: Sequence[Answer]) -> None:
        """MeasurementFailed if an answer that claims success is not right, or if there is none."""
        succeeded = [each for each in answers if _OK_FROM <= each[1] < _OK_TO]
        if not succeeded:
            raise MeasurementFailed(f"none of {len(answers)} calls succeeded: {answers[:1]!r}")
        for number, _, body in succeeded:
            if not self._right(number, body):
                raise MeasurementFailed(f"the answer to call {number} is wrong: {body[:200]!r}")

    def _right(self, number: int, body: bytes) -> bool:
        if not self.expected:
            return b"hello" in body
        expected = self.expected[number]
        try:
            found = self.form.scores(json.loads(body))
            return len(found) == len(expected) and all(map(_close, found, expected))
        except (ValueError, LookupError, TypeError):
            return False


def empty_calls(path: str, form: CallForm = PLAIN_FORM) -> CheckedCalls:
    """One call that is answered with `hello`; it carries what a computing call carries."""
    return CheckedCalls([http_post(path, body=bodies(form)[0])])


def computing_calls(path_of_seed: Mapping[int, str], form: CallForm = PLAIN_FORM) -> CheckedCalls:
    """Calls of the functions at these paths in turn, each with numbers and weights of its own."""
    models = {seed: two_layers(seed) for seed in path_of_seed}
    calls, expected = [], []
    for numbers, body in zip(_numbers(), bodies(form), strict=True):
        for seed, path in path_of_seed.items():
            calls.append(http_post(path, body=body))
            expected.append(scores(models[seed], numbers))
    return CheckedCalls(calls, expected, form)


def bodies(form: CallForm = PLAIN_FORM) -> list[bytes]:
    """Requests with different numbers, the same each time."""
    return [json.dumps(form.request(numbers)).encode() for numbers in _numbers()]


def _numbers() -> list[list[float]]:
    random = Random(1)
    return [[random.randint(-16, 16) / 8 for _ in range(FEATURES)] for _ in range(_REQUESTS)]
