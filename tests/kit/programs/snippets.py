"""Snippets of Python, each run in a fork of one process: importing torch takes long."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.kit.places import ACTIVATE

_SERVER = """
import gc, importlib, json, linecache, os, sys, traceback, warnings
import torch

for name in sys.argv[1:]:
    importlib.import_module(name)

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

gc.collect()
gc.freeze()  # a fork's collections then write to none of the pages that it shares

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


@contextmanager
def snippets(environment: Mapping[str, str], *modules: str) -> Iterator[Snippet]:
    """Run snippets with torch and these modules imported; an exception there fails the test."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, *modules],
        env=environment,
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
            failure = json.loads(line) if line else "the process of the snippets is gone"
            if failure:
                pytest.fail(failure, pytrace=False)

        yield run
        questions.close()


def shim_environment(**more: str) -> dict[str, str]:
    """The environment of a process under the shim, as a launcher sets it."""
    ours = ("GPUFAAS_", "OMP_WAIT_POLICY")  # of the second the shim takes care
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    shim = {"PYTHONPATH": str(ACTIVATE), "GPUFAAS_ENABLED": "1", "GPUFAAS_CAPTURE": "0"}
    return {**kept, "OMP_NUM_THREADS": "2", "GPUFAAS_GPU_MEMORY": str(8 << 30), **shim, **more}


def failures_of(shim: Snippet, sources: Mapping[str, str]) -> dict[str, str]:
    """The snippets that fail, with the traceback of each."""
    assert sources
    failures = {}
    for name, source in sources.items():
        try:
            shim(source)
        except pytest.fail.Exception as failure:
            failures[name] = f"{name}\n{failure}"
    return failures


def calls(text: str) -> list[str]:
    """The expressions of a list."""
    return [" ".join(call.split()) for call in text.split(" |")]
