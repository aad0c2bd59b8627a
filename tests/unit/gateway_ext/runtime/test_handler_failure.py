"""What is answered and logged when a handler raises."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from gateway_ext.runtime import handler_module
from gateway_ext.runtime.handler_module import HandlerErrors
from gateway_ext.runtime.handler_values import BadResponse, answer_of
from torch_shim.errors import (
    DataUnreachable,
    GpuQueueFull,
    GpuUnavailable,
    ManagerUnreachable,
    QuotaUsedUp,
    RemoteFailure,
    ShimError,
)

ERRORS = HandlerErrors("/functions/f")
SHOWN = HandlerErrors("/functions/f", shows_text=True, log_command="faas-cli logs f")


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as found:
        raise error
    return found.value


def test_call_is_put_off_when_a_quota_is_used_up() -> None:
    found = ERRORS.failure(raised(QuotaUsedUp("request r: team has 3 of 3 leases")))
    assert (found.status, found.logged) == (429, f"was put off: {found.why}")
    assert "team has 3 of 3 leases" in found.why


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GpuUnavailable("CUDA error: worker lost: the GPU manager was lost"), 503),
        (ManagerUnreachable("unix:/node.sock", "connection refused"), 503),
        (DataUnreachable("this node's GPU manager cannot be reached"), 503),
        (GpuQueueFull("CUDA error: queue full: 4096 requests wait"), 429),
    ],
)
def test_call_may_come_again_when_it_is_not_to_blame(error: Exception, status: int) -> None:
    found = ERRORS.failure(raised(error))
    assert found == (status, str(error), f"was put off: {error}")


@pytest.mark.parametrize("error", [RemoteFailure("worker lost", "it ended"), ValueError("x")])
def test_any_other_error_is_answered_500_and_logged_with_its_place(error: Exception) -> None:
    found = ERRORS.failure(raised(error))
    assert (found.status, found.why) == (500, f"the function raised {type(error).__name__}")
    assert found.logged.startswith("raised\nTraceback")


def test_status_of_an_error_is_not_any_number() -> None:
    class Odd(Exception):
        answer_status = 200

    assert ERRORS.failure(Odd()).status == 500


def test_error_is_one_of_the_shims_and_of_torch() -> None:
    assert issubclass(QuotaUsedUp, ShimError)
    assert issubclass(QuotaUsedUp, RuntimeError)


# -- what an author sees -------------------------------------------------------------------------


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandlerErrors:
    """Of a handler in this folder, which is imported as the runtime does it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return HandlerErrors(str(tmp_path), shows_text=True, log_command="faas-cli logs f")


def import_error(errors: HandlerErrors, handler: str | None) -> str:
    if handler is not None:
        (Path(errors.folder) / "handler.py").write_text(handler)
    with pytest.raises(BaseException) as found:  # noqa: PT011 - of any kind
        handler_module.load(Path(errors.folder))
    return errors.import_failure(found.value)


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (None, "handler.py does not exist in the function's folder"),
        ("def handle(event, context)\n", "SyntaxError: expected ':' (handler.py, line 1)"),
        ("\nimport nix\n", "ModuleNotFoundError: No module named 'nix' (handler.py, line 2)"),
        ("x = 1\n", "handler.py has no function `handle`"),
        (
            "class handle:\n    def __init__(self, event, context): ...\n",
            "handle is a class: a function handle(event, context) is expected",
        ),
        (
            "def handle(req): ...\n",
            "handle(req) takes 1 argument: handle(event, context) is expected",
        ),
        (
            "def handle(a, b, c): ...\n",
            "handle(a, b, c) takes 3 arguments: handle(event, context) is expected",
        ),
        (
            "class Odd:\n    def __repr__(self): raise ValueError('no')\n"
            "def handle(a, b, c, /, d: Odd() = Odd(), *, e=b'x' * 5_000_000) -> Odd(): ...\n",
            "handle(a, b, c, /, d, *, e) takes 5 arguments: handle(event, context) is expected",
        ),
        (
            f"def handle({'a' * 1_000}): ...\n",
            f"handle({'a' * 199}...) takes 1 argument: handle(event, context) is expected",
        ),
        ("raise SystemExit(7)\n", "SystemExit: 7 (handler.py, line 1)"),
        ("raise ValueError('a\\nb')\n", "ValueError: a b (handler.py, line 1)"),
    ],
)
def test_last_line_says_why_the_handler_cannot_be_imported(
    errors: HandlerErrors, handler: str | None, why: str
) -> None:
    found = import_error(errors, handler)
    assert found.splitlines()[-1] == f"its handler cannot be imported: {why}"
    assert errors.folder not in found


@pytest.mark.parametrize(
    "handler",
    [
        "def handle(event, context, *, retries=2): ...\n",
        "def handle(*args): ...\n",
        "def handle(event, context=None): ...\n",
        "class Model:\n    def __call__(self, event, context): ...\nhandle = Model()\n",
        "import functools\nhandle = functools.partial(lambda a, event, context: a, 1)\n",
        "handle = max\n",
        "def inner(event): ...\ndef handle(event, context): ...\nhandle.__wrapped__ = inner\n",
        "import inspect\ndef inner(event): ...\ndef handle(event, context): ...\n"
        "handle.__signature__ = inspect.signature(inner)\n",
    ],
)
def test_handler_is_taken_when_it_can_be_called_with_both_or_nobody_knows(
    errors: HandlerErrors, handler: str
) -> None:
    (Path(errors.folder) / "handler.py").write_text(handler)
    assert callable(handler_module.load(Path(errors.folder)))


def test_traceback_begins_at_the_authors_line_and_names_its_file_in_the_folder(
    errors: HandlerErrors,
) -> None:
    (Path(errors.folder) / "own.py").write_text("def fail():\n    import json; json.loads('x')\n")
    handler = "import own\ndef handle(event, context):\n    own.fail()\n"
    (Path(errors.folder) / "handler.py").write_text(handler)
    handle = handler_module.load(Path(errors.folder))
    with pytest.raises(ValueError, match="Expecting value") as found:
        handle(None, None)  # type: ignore[arg-type]  # a plain handler, which looks at neither
    lines = errors.raised(found.value).splitlines()
    places = [line.strip() for line in lines if line.startswith("  File ")]
    assert places[:2] == [
        'File "handler.py", line 3, in handle',
        'File "own.py", line 2, in fail',
    ]
    assert all("json" in place for place in places[2:]), "the library's frames are kept"


def test_traceback_keeps_packages_whose_names_begin_as_those_that_are_hidden(
    errors: HandlerErrors, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    torch = ModuleType("torch")
    torch.__path__ = [str(site / "torch")]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.syspath_prepend(str(site))
    (site / "torchlike.py").write_text("import other\ndef f():\n    other.f()\n")
    (site / "other.py").write_text("def f():\n    int('x')\n")
    found = import_error(errors, "import torchlike\ntorchlike.f()\n")
    assert f'File "{site}/torchlike.py", line 3, in f' in found


def test_caller_is_told_the_text_of_an_error_only_where_it_may_be() -> None:
    error = raised(KeyError("password of the datastore"))
    told = SHOWN.failure(error, "c-1").why
    assert told == (
        "the function raised KeyError: 'password of the datastore'; its log: faas-cli logs f,"
        " call c-1"
    )
    hidden = HandlerErrors("/functions/f", log_command="faas-cli logs f").failure(error, "c-1")
    assert hidden.why == "the function raised KeyError; its log: faas-cli logs f, call c-1"


def test_error_is_described_although_its_text_cannot_be_had() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert SHOWN.failure(raised(Odd())).status == 500


@pytest.mark.parametrize("wrapped", [False, True])
def test_remedy_is_named_when_the_answer_is_a_tensor(*, wrapped: bool) -> None:
    class Tensor:
        __module__ = "torch"

        def tolist(self) -> list[float]:
            return []

    with pytest.raises(BadResponse) as found:
        answer_of({"scores": Tensor()} if wrapped else Tensor())
    failure = SHOWN.failure(found.value)
    assert "return x.tolist(), or let the caller send X-Gpu-Data: handle" in failure.why
    assert "Traceback" not in failure.logged, "none of its lines is the author's"
