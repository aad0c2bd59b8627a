"""The functions that the campaign calls; each notes every call that it begins in a file.

What they answer is known beforehand: a model adds a number of its own to what it is given.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hunt.campaign.judging.call_journal import Kind
from tests.kit.stacks import handlers
from tests.kit.stacks.load import Asked, warm
from tests.kit.stacks.stack import Reached, Rest

TOKENS = 5
STREAM_END = "done"

_NOTE = """
import os
def note(event):
    with open(os.environ["EXECUTED"], "a") as file:
        file.write(event.headers["x-call-id"] + "\\n")
"""
_PLAIN = (
    _NOTE
    + """
def handle(event, context):
    note(event)
    return event.body.decode()
"""
)
# 40 MiB of weights that multiply exactly: 1,024 inputs of n, each by 2^-10, give n.
_ON_GPU = (
    _NOTE
    + """
import torch
model = torch.nn.Linear(1024, 10240)
with torch.no_grad():
    model.weight.fill_(2.0 ** -10)
    model.bias.fill_({adds}.0)
model = model.eval().cuda()
def added(number):
    with torch.no_grad():
        return int(model(torch.full((1, 1024), float(number), device="cuda"))[0, 0])
"""
)
_SYNC = (
    _ON_GPU
    + """
def handle(event, context):
    note(event)
    return str(added(int(event.body)))
"""
)
_STREAM = (
    _ON_GPU
    + """
def handle(event, context):
    note(event)
    return {{"statusCode": 200, "body": lines(int(event.body))}}
def lines(number):
    for _ in range({tokens}):
        number = added(number)
        yield f"{{number}}\\n"
    yield "{end}\\n"
"""
)


class CampaignFunction(NamedTuple):
    """A function, what it adds to a number at each step, and its steps."""

    name: str
    adds: int
    steps: int

    def answer(self, number: int) -> str:
        """What it has to answer to this number."""
        numbers = [number + self.adds * step for step in range(1, self.steps + 1)]
        if self.steps == 1:
            return str(numbers[0])
        return "\n".join([*map(str, numbers), STREAM_END, ""])


_ADDER = CampaignFunction("adder", 1, 1)
FUNCTIONS: Mapping[Kind, CampaignFunction] = {
    Kind.PLAIN: CampaignFunction("echo", 0, 1),
    Kind.SYNC: _ADDER,
    Kind.ASYNC: _ADDER,
    Kind.STREAM: CampaignFunction("ticker", 2, TOKENS),
}
GPU_FUNCTIONS = ("adder", "ticker")


def deploy(system: Reached, work: Path) -> None:
    """Have them all ready, and known with their models."""
    rest = Rest(system)
    noted = executions_file(work)
    noted.touch()
    noted.chmod(0o666)  # functions run as other users
    adder = _SYNC.format(adds=_ADDER.adds)
    stream = _STREAM.format(adds=FUNCTIONS[Kind.STREAM].adds, tokens=TOKENS, end=STREAM_END)
    for name, text in (("echo", _PLAIN), ("adder", adder), ("ticker", stream)):
        gpu = {"com.gpufaas.enabled": str(name in GPU_FUNCTIONS).lower()}
        annotations = {**handlers.write(work, name, text), **gpu}
        # More replicas would stay for a minute, and look as if they were left.
        labels = {"com.openfaas.scale.max": "1"}
        variables = {"EXECUTED": str(noted)}
        rest.deploy(name, annotations=annotations, labels=labels, envVars=variables)
    for name in GPU_FUNCTIONS:
        warm(system, rest, Asked(name, b"1"))


def executions_file(work: Path) -> Path:
    """Where functions note the ids of calls that they begin."""
    return work / "executed"


class Executions:
    """How often each call was begun, of all rounds of a world; reads what is new of the file."""

    def __init__(self, work: Path) -> None:
        self._file = executions_file(work)
        self._read_bytes = 0
        self._begun: Counter[str] = Counter()

    def look(self) -> Mapping[str, int]:
        """The calls that were begun since the last look, with how often they were in all."""
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            text, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(text) + len(newline)
        begun = Counter(text.decode().split())
        self._begun += begun
        return {call: self._begun[call] for call in begun}
