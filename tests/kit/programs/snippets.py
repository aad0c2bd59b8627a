"""Snippets of Python, each run in a fork of one process: importing torch takes long."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

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
