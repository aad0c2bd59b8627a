"""What users are told of work that stays in the function: the reason, a remedy, the line.

The patterns match messages of Dynamo and the shim; a test compares them with Dynamo's own list.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch_shim


class Advice(NamedTuple):
    """An explanation and a remedy."""

    why: str
    remedy: str


_KEEP_OUT = "keep it out of forward"
_NUMBERS = "keep the value in a tensor, or read it outside of forward"
_PRINTS = "take it out of forward, or guard it with torch.compiler.is_compiling()"
_CHECKPOINT = Advice("an activation checkpoint computes gradients", "pass use_reentrant=False")
_NUMPY = Advice("NumPy computes on the function's own processor", "use the torch function instead")

# The first match applies.
BREAKS: tuple[tuple[str, Advice], ...] = (
    (
        r"Data-dependent (branching|assertion)|generic_jump|Dynamic slicing|"
        r"Could not guard on data-dependent",
        Advice("a branch depends on a tensor's value", "use torch.where, or branch on a shape"),
    ),
    (
        r"Tensor\.item\(\)|\.tolist\(\)|Data dependent operator|Failed to convert args/kwargs",
        Advice("a tensor's value becomes a Python number", _NUMBERS),
    ),
    (
        r"Dynamic shape operator|data-dependent out|Unhinted data-dependent",
        Advice("the result's size depends on values", "mask instead of selecting"),
    ),
    (
        r"^Random numbers$|generator which no graph has",
        Advice("it draws by NumPy or Python's random", "draw by PyTorch's functions"),
    ),
    (
        r"^Hook on a computed tensor",
        Advice("it registers a hook on a tensor", "register it outside of forward"),
    ),
    (
        r"backwards hooks require",
        Advice("a module has a backward hook", "remove it for calls without gradients"),
    ),
    (r"^Reentrant checkpoint", _CHECKPOINT),
    (
        r"^Custom operator|No worker has the operator",
        Advice("workers know PyTorch's own operators only", "write it with PyTorch's operators"),
    ),
    (
        r"^Cached function|answers from its cache",
        Advice("a function answers from its cache", "call it outside of forward"),
    ),
    (r"logging\.Logger|reorder a debugging function", Advice("it writes a log", _PRINTS)),
    (r"Call to a time function", Advice("it reads the clock", "measure around the model")),
    (
        r"Failed to trace builtin operator|builtin op\b|builtin operator",
        Advice("it calls a builtin that touches the outside (print, open, ...)", _PRINTS),
    ),
    (
        r"generator",
        Advice("a generator is left half consumed, or passed on", "use a list, or a plain loop"),
    ),
    (r"[Nn]um[Pp]y|ndarray", _NUMPY),
    (
        r"autograd\.Function|AutogradFunction",
        Advice("a custom autograd function does what no graph can hold", "call it under no_grad()"),
    ),
    (
        r"torch\.jit|ScriptModules|TorchScript|wrap_jit_function",
        Advice("TorchScript is inside of the model", "call the module itself, unscripted"),
    ),
    (
        r"RNN, GRU, or LSTM",
        Advice(
            "a recurrent layer is called in a way that no graph holds", "call it from nn.Module"
        ),
    ),
    (
        r"Inplace op on input|resize_\(\)|resize_as_\(\)|set_\(\)|\.data\b|tensor data attribute",
        Advice("an input is changed in place, in shape or memory", "make a new tensor instead"),
    ),
    (
        r"disable\(\)`d? function|_dynamo\.disable|compiler\.disable",
        Advice("torch.compiler.disable keeps it out of graphs", "take it away, or off models"),
    ),
    (
        r"torch\._dynamo\.(graph_break|skip_frame|step_unsupported)",
        Advice("the program asks for a break", "take it away"),
    ),
    (
        r"[Ss]parse|NestedTensor|nested_tensor",
        Advice("no graph holds sparse or nested tensors", "use dense, padded tensors"),
    ),
    (
        r"grad_fn|backward\(\)|requires_grad|autograd\.grad",
        Advice("it computes gradients", _KEEP_OUT),
    ),
    (
        r"[Cc]ontext manager|GenericContextWrapping|contextlib",
        Advice("a break stands inside of a `with` block", "move the `with` out of forward"),
    ),
    (r"torch\.Generator|random", Advice("it draws from a generator of its own", _KEEP_OUT)),
    (
        r"recompile limit",
        Advice("it is called in too many different ways", "pad inputs to a few shapes"),
    ),
    (
        r"marked as skipped|not implemented in python|skip frame|skipped function",
        Advice("it calls into compiled code that is not PyTorch's", "use torch, or call it before"),
    ),
    (
        r"Observed exception|Caught non-Exception|Failed to raise|Exception with",
        Advice("an exception is raised and caught inside", "test for the condition instead"),
    ),
    (
        r"Bad import|Import failure",
        Advice("it imports a module while it runs", "import it at the top of the file"),
    ),
)

_OTHER_BREAK = Advice("Dynamo cannot follow it", _KEEP_OUT)
_OURS = "a gap in gpufaas: please report it with this line"
NO_REMEDY = "nothing"  # a remedy that begins so asks for no change
_GRADIENTS = Advice(
    "gradients are computed on the function's own processor",
    "call the model under torch.no_grad(), or train elsewhere",
)

LOCAL: tuple[tuple[str, Advice], ...] = (
    (r"^gradients are asked for|^backward$|^it writes to its buffers", _GRADIENTS),
    (r"^a reentrant checkpoint", _CHECKPOINT),
    (
        r"^it records gradients of inference",
        Advice("it records gradients of inference tensors", "call .clone() on those first"),
    ),
    (r"^only CPU tensors", Advice("its tensors are on the CPU", "move inputs with .to('cuda')")),
    (r"^layout ", Advice("workers take dense tensors only", "call .to_dense() first")),
    (
        r"^program refused: operator 'h:|^operator 'h:|^higher-order operator|^a call of a ",
        Advice("workers do not have this higher-order operator", "write it out"),
    ),
    (
        r"^program refused: operator 'm:__(round|trunc|floor|ceil|int|float)__",
        Advice("it computes with a number that was a tensor's value", _NUMBERS),
    ),
    (r"^function .*numpy|^function torch\._dynamo", _NUMPY),
    (
        r"^function |^program refused: operator|^operator .* is not allowed",
        Advice("workers know PyTorch's own operators only", "write it with PyTorch's operators"),
    ),
    (
        r"^operator failed|^worker failed",
        Advice("a worker failed at it, and the function did not", _OURS),
    ),
    (
        r"^a hook on a tensor",
        Advice("it registers a hook on a tensor", "register it outside of forward"),
    ),
    (
        r"^a transform of torch.func",
        Advice(
            "torch.func computes on the function's own processor",
            "transform inside of a module's forward, or call the model itself",
        ),
    ),
    (r"^TorchScript", Advice("TorchScript runs as it is", "call the module itself, unscripted")),
    (
        r"^it writes to its inputs",
        Advice("it changes its inputs while gradients are recorded", "call it under no_grad()"),
    ),
    (
        r"^its outputs share memory",
        Advice(
            "its outputs share memory while gradients are recorded",
            "call it under no_grad(), or return a .clone() of one of them",
        ),
    ),
    (
        r"^Dynamo passes over",
        Advice("Dynamo cannot trace it as a whole", "nothing: its parts run in graphs"),
    ),
    (
        r"^no module and no function",
        Advice(
            "it calls no module with plain weights on the GPU, and no function under torch.compile",
            "put torch.compile around what computes, or write it as a module with its tensors",
        ),
    ),
    (r"^no GPU manager", Advice("no GPU manager answers", "set GPUFAAS_ADDRESS")),
    (r"^no weights on the GPU", Advice("none of its weights is on the GPU", "call .to('cuda')")),
    (
        r"is being (traced|imported)$",
        Advice("a first call does not wait for its graph", "nothing: later calls are answered"),
    ),
    (r"^out of memory", Advice("the GPU has too little memory", "use smaller batches")),
)


def for_break(reason: str) -> Advice:
    return _advice(BREAKS, reason) or _OTHER_BREAK


def for_local(reason: str) -> Advice:
    """Return the advice about a captured graph that ran in the function, by the shim's reason."""
    return _advice(LOCAL, reason) or Advice(reason, _OURS)


def _advice(table: tuple[tuple[str, Advice], ...], reason: str) -> Advice | None:
    for pattern, advice in table:
        if re.search(pattern, reason):
            return advice
    return None


# Tells users, once for each place in their code, what stays in the function, and a remedy.
#
# The lines go to the log, and with the function's answers to its gateway, whose page shows them.

log = logging.getLogger("gpufaas")

_MOST_TOLD = 30
_MOST_CHARACTERS = 240  # of one line on its way to a gateway
_MOST_SENT = 4  # with one answer: all have to fit into one header
_TIMES_SENT = 3  # an answer may not arrive
_BETWEEN = "|"  # lines in a header
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_LIBRARIES = ("site-packages", "dist-packages")


class CodePlace(NamedTuple):
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "?"


class ToldPlaces:
    """What this process has told; a place and a reason are told once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[tuple[CodePlace, str], None] = {}
        self._unsent: dict[str, int] = {}

    def tell(self, place: CodePlace, what: str, advice: Advice) -> None:
        """Log it, and keep it for the gateway, unless it was told or there is nothing to do."""
        if advice.remedy.startswith(NO_REMEDY):
            return
        key = (place, advice.why)
        with self._lock:
            if key in self._told or len(self._told) > _MOST_TOLD:
                return
            self._told[key] = None
            full = len(self._told) > _MOST_TOLD
            if not full:
                self._unsent[_shortened(place, advice)] = _TIMES_SENT
        if full:
            log.warning("more of the program stays in the function: see `gpufaas check`")
        else:
            log.warning("%s: %s: %s (%s)", _as_imported(place), what, advice.why, advice.remedy)

    def to_send(self) -> list[str]:
        """Return lines for the gateway, each a few times, as text for a header."""
        if not self._unsent:
            return []
        with self._lock:
            chosen = list(self._unsent)[:_MOST_SENT]
            for line in chosen:
                self._unsent[line] -= 1
                if not self._unsent[line]:
                    del self._unsent[line]
        return chosen

    def after_fork(self) -> None:
        """Keep what the parent has told, with a lock of the child's own."""
        self._lock = threading.Lock()


def users_line() -> CodePlace:
    """Return the innermost line of the program's own code, else of a library of its."""
    places = list(_callers())
    own = [place for place in places if not any(name in place.file for name in _LIBRARIES)]
    return next(iter(own or places), CodePlace("", 0))


def is_outside(file: str) -> bool:
    """Whether code is neither PyTorch's, nor of Python's library, nor the shim's."""
    of_python = file.startswith(_PYTHON) and not any(name in file for name in _LIBRARIES)
    ours = ("<", *(f"{folder}{os.sep}" for folder in torch_shim.__path__))
    return not (of_python or file.startswith(ours) or _TORCH in file)


def _callers() -> Iterator[CodePlace]:
    """The lines outside of PyTorch, Python's library and the shim, the innermost first."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way to it
    while frame is not None:
        if is_outside(frame.f_code.co_filename):
            yield CodePlace(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


def _shortened(place: CodePlace, advice: Advice) -> str:
    line = f"{_as_imported(place)}: {advice.why}; {advice.remedy}"[:_MOST_CHARACTERS]
    return "".join(
        character if " " <= character <= "~" and character != _BETWEEN else "?"
        for character in line
    )


def _as_imported(place: CodePlace) -> CodePlace:
    """The file below the folder that Python found it in, else its last parts."""
    file = place.file
    folders = [folder for folder in sys.path if folder and file.startswith(f"{folder}{os.sep}")]
    if folders:
        return place._replace(file=file[len(max(folders, key=len)) + 1 :])
    return place._replace(file="/".join(Path(file).parts[-3:]))


told_places = ToldPlaces()
