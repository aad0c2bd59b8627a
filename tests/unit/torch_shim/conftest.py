"""A process under the shim that runs snippets, each in a fork: importing torch takes long."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from tests.kit.places import ROOT

ACTIVATE = ROOT / "torch_shim" / "activate"

_SERVER = """
import json, linecache, os, sys, traceback, warnings
import torch

def run(source):
    sys.stdout = sys.stderr
    try:
        warnings.simplefilter("error")
        lines = source.splitlines(keepends=True)
        linecache.cache["snippet"] = (len(source), None, lines, "snippet")
        exec(compile(source, "snippet", "exec"), {"__name__": "__main__", "torch": torch})
    except BaseException:
        return traceback.format_exc()
    return ""

for line in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        answer = run(json.loads(line))
        with os.fdopen(write, "w") as pipe:
            pipe.write(answer)
        os._exit(1 if answer else 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status and not answer:
        answer = f"ended with status {status}"
    print(json.dumps(answer), flush=True)
"""

Snippet = Callable[[str], None]


def shim_environment(**more: str) -> dict[str, str]:
    """The environment of a process under the shim, as a launcher sets it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUFAAS_")}
    shim = {"PYTHONPATH": str(ACTIVATE), "GPUFAAS_ENABLED": "1", "GPUFAAS_CAPTURE": "0"}
    return {**kept, "OMP_NUM_THREADS": "2", "GPUFAAS_GPU_MEMORY": str(8 << 30), **shim, **more}


@pytest.fixture(scope="session")
def shim() -> Iterator[Snippet]:
    """Runs a snippet under the shim, with torch imported; an exception there fails the test."""
    yield from _serve(_SERVER)


@pytest.fixture(scope="session")
def dynamo_shim() -> Iterator[Snippet]:
    """The same with Dynamo imported too, which takes as long again."""
    yield from _serve("import torch._dynamo\n" + _SERVER)


def _serve(program: str) -> Iterator[Snippet]:
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=shim_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        questions, answers = server.stdin, server.stdout
        assert questions is not None
        assert answers is not None

        def run(source: str) -> None:
            print(json.dumps(textwrap.dedent(source)), file=questions, flush=True)
            line = answers.readline()
            failure = json.loads(line) if line else "the process under the shim is gone"
            if failure:
                pytest.fail(failure, pytrace=False)

        yield run
        questions.close()
