"""Function processes, native or under the shim, which carry out orders."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench.measure.function_orders import FunctionOrder, OrderResult
from bench.measure.report import MeasurementFailed

ROOT = Path(__file__).parents[2]

Environment = Mapping[str, str]


class FunctionProcess:
    """A function process that carries out one order at a time."""

    def __init__(self, environment: Environment, *, shim: bool) -> None:
        self._shim = shim
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.measure.function_program"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, order: FunctionOrder) -> None:
        """Send an order without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()

    def receive(self) -> OrderResult:
        """The answer; MeasurementFailed if a function under the shim computed something itself."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementFailed(f"a function ended with {self._process.wait()}")
        answer = OrderResult(**json.loads(line))
        if self._shim and (answer.local or not answer.graphs):
            raise MeasurementFailed(f"no worker answered: {answer.local or answer.device}")
        return answer

    def ask(self, order: FunctionOrder) -> OrderResult:
        """Send an order and wait for its answer."""
        self.send(order)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def function_process(environment: Environment, *, shim: bool = False) -> Iterator[FunctionProcess]:
    """A function process, natively or under the shim."""
    made = FunctionProcess(environment, shim=shim)
    try:
        yield made
    finally:
        made.close()


def run(program: Sequence[str], environment: Environment) -> str:
    """Run a Python program to its end; its standard output."""
    found = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return found.stdout
