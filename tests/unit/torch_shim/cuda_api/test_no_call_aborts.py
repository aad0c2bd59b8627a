"""Public callables of torch.cuda: none ends the process, none asks an absent driver."""

from pathlib import Path

import pytest

from tests.kit.programs.snippets import Snippet

_WALK = """
import importlib, inspect, os, signal, traceback, types, warnings
warnings.simplefilter("ignore")
for name in ("nccl", "nvtx", "profiler", "tunable", "jiterator", "gds", "comm", "amp"):
    try:
        importlib.import_module(f"torch.cuda.{name}")
    except ImportError:
        pass
x = torch.ones(3).cuda()
ARGUMENTS = [(), (0,), (x,), ([x],), ("x",), (x, 0), ([x], [x]), (1024,)]
OF_DRIVER = ("driver version", "no NVIDIA driver", "libcuda", "No CUDA GPUs", "not compiled with")

def attempts(function):
    for arguments in ARGUMENTS:
        try:
            function(*arguments)
        except BaseException as error:
            if any(words in str(error) for words in OF_DRIVER):
                return f"{arguments!r:.30}: {error!r:.120}"
    return ""

def ends(function):
    "How a child ends that calls the function: nothing, or what is wrong."
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        signal.alarm(120)  # of a call that hangs
        os.write(write, attempts(function).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return f"signal {status}" if os.WIFSIGNALED(status) else said

def walk(module):
    found = {}
    for name in dir(module):
        function = getattr(module, name)
        ours = str(getattr(function, "__module__", "torch")).startswith("torch")
        if not name.startswith("_") and callable(function) and ours:
            wrong = ends(function)
            if wrong:
                found[name] = wrong
    return found
"""


@pytest.mark.parametrize(
    "module",
    [
        "torch.cuda",
        "torch.accelerator",
        "torch.backends.cuda",
        "torch.backends.cudnn",
        *(
            f"torch.cuda.{name}"
            for name in (
                "amp",
                "comm",
                "gds",
                "graphs",
                "jiterator",
                "memory",
                "nccl",
                "nvtx",
                "profiler",
                "random",
                "sparse",
                "streams",
                "tunable",
            )
        ),
    ],
)
def test_no_public_call_aborts_or_asks_the_driver(
    shim: Snippet, module: str, tmp_path: Path
) -> None:
    shim(f"""{_WALK}
os.chdir({str(tmp_path)!r})  # some write files
try:
    module = importlib.import_module({module!r})
except ImportError:  # this version of torch has no such module
    pass
else:
    found = walk(module)
    assert not found, found
""")
