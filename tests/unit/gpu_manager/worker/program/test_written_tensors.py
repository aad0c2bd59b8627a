"""What a program writes to is seen, whichever operator wrote it and however the program ended."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import Inputs, InputStorage, TensorInput
from gpu_manager.worker.program.tensor_specs import read_spec
from tests.kit.worlds.caller import CallFailed, LocalWorker, program, step, weight
from torch_shim.wire.programs import Named, ProgramPart, Ref

importlib.import_module("torchvision")  # registers its operators
TABLE = OperatorTable(torch.device("cpu"))
F = "t:torch.nn.functional."
NEST = "t:torch._functorch.predispatch._vmap_increment_nesting"
INTO = "t:torch._functorch.predispatch._add_batch_dim"
LOOK = program(step("o:mul", Ref(0), 1), output=[Ref(1)])


def version(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 - the counter that autograd goes by


# --- torch's own table ------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "floats": lambda: torch.rand(3, 3) * 0.8 + 0.1,
    "whole numbers": lambda: torch.ones(3, 3, dtype=torch.int64),
    "truths": lambda: torch.ones(3, 3, dtype=torch.bool),
    "a row": lambda: torch.rand(3),
}
INDICES: tuple[Callable[[], torch.Tensor], ...] = (
    lambda: torch.zeros(3, 3, dtype=torch.int64),
    lambda: torch.arange(3),
)
VALUES = {"int": 1, "SymInt": 1, "float": 0.5, "number": 1, "bool": True, "str": "add"}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


# Where equal shapes and usual numbers are refused.
BY_HAND: dict[str, Callable[[], list[Any]]] = {
    "_batch_norm_with_update.default": lambda: [
        ones(2, 3, 2),
        None,
        None,
        ones(3),
        ones(3),
        0.1,
        1e-5,
    ],
    "_native_batch_norm_legit.default": lambda: [
        *(ones(2, 3, 2), None, None, ones(3), ones(3), True, 0.1, 1e-5)
    ],
    "addbmm_.default": lambda: [ones(2, 4), ones(5, 2, 3), ones(5, 3, 4)],
    "addmv_.default": lambda: [ones(2), ones(2, 3), ones(3)],
    "addr_.default": lambda: [ones(2, 3), ones(2), ones(3)],
    "baddbmm_.default": lambda: [ones(5, 2, 4), ones(5, 2, 3), ones(5, 3, 4)],
    "clamp_.Tensor": lambda: [ones(3), ones(3)],
    "clamp_.default": lambda: [ones(3), 0.5],
    "clip_.Tensor": lambda: [ones(3), ones(3)],
    "clip_.default": lambda: [ones(3), 0.5],
    "fill_.Tensor": lambda: [ones(3), ones()],
    "float_power_.Scalar": lambda: [ones(3).double(), 2.0],
    "float_power_.Tensor": lambda: [ones(3).double(), ones(3).double()],
    "index_fill_.int_Tensor": lambda: [ones(3), 0, torch.arange(2), ones()],
    "index_put_.default": lambda: [ones(3), [torch.arange(2)], ones(2)],
    "index_reduce_.default": lambda: [ones(3), 0, torch.arange(3), ones(3), "prod"],
    "scatter_reduce_.two": lambda: [ones(3), 0, torch.arange(3), ones(3), "sum"],
    "masked_fill_.Tensor": lambda: [ones(3), ones(3).bool(), ones()],
    "squeeze_.dims": lambda: [ones(1, 1, 3), [0, 1]],
}
_WRITES_NOTHING = {"detach_.default"}  # it takes the tensor out of autograd's graph


def _schema(name: str) -> Any:
    short, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, short), overload)._schema  # noqa: SLF001 - torch has no public way to ask


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _value(argument: Any, tensors: str, indices: Callable[[], torch.Tensor]) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        if "mask" in argument.name:
            return MAKERS["truths"]()
        return (indices if argument.name in ("index", "indices") else MAKERS[tensors])()
    if kind.startswith("Optional["):
        return None
    return [1, 1] if kind.startswith("List[") else VALUES.get(kind)


def _calls(name: str, schema: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Some arguments that the overload may take."""
    if name in BY_HAND:
        yield BY_HAND[name](), {}
        return
    for tensors, indices in itertools.product(MAKERS, INDICES):
        arguments, named = [], {}
        for argument in schema.arguments:
            has_value = argument.has_default_value() and not _writes(argument)
            if argument.name == "training":
                arguments.append(True)
            elif argument.kwarg_only and not has_value:
                named[argument.name] = _value(argument, tensors, indices)
            elif not argument.kwarg_only:
                chosen = argument.default_value if has_value else _value(argument, tensors, indices)
                arguments.append(chosen)
        yield arguments, named


def _unseen(name: str) -> str | None:
    """What is wrong with an overload that writes, as its schema says."""
    schema, operator = _schema(name), TABLE.find(f"a:aten::{name}")
    for arguments, named in _calls(name, schema):
        places = [place for place, each in enumerate(schema.arguments) if _writes(each)]
        before = [version(arguments[place]) for place in places]
        try:
            operator(*arguments, **named)  # type: ignore[misc] # the name is on the list
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            continue
        after = [version(arguments[place]) for place in places]
        pairs = zip(places, before, after, strict=True)
        unseen = [schema.arguments[place].name for place, was, now in pairs if was == now]
        return f"{name} writes unseen to {unseen}" if unseen else None
    return f"{name} was never called"


@pytest.mark.filterwarnings("ignore")
def test_every_overload_that_writes_raises_the_versions_that_its_schema_names() -> None:
    names = [name[len("a:aten::") :] for name in TABLE.names() if name.startswith("a:aten::")]
    writing = [name for name in names if "." in name and any(map(_writes, _schema(name).arguments))]
    assert len(writing) > 200
    with torch.no_grad():
        found = [_unseen(name) for name in writing if name not in _WRITES_NOTHING]
    assert [each for each in found if each] == []


# --- weights ----------------------------------------------------------------------------------

WRITING = {
    "rrelu": [step("t:torch._C._nn.rrelu_with_noise", Ref(0), Ref(0), 0.1, 0.3, True)],
    "rrelu in place": [
        step("m:neg", Ref(0)),
        step("a:aten::rrelu_with_noise_.default", Ref(1), Ref(0), 0.1, 0.3, True),
    ],
    "rrelu by name": [
        step("m:neg", Ref(0)),
        step("a:aten::rrelu_with_noise", Ref(1), noise=Ref(0), training=True),
    ],
    "a view that no schema tells of": [
        step("a:aten::_unsafe_view.default", Ref(0), [2, 4]),
        step("m:zero_", Ref(1)),
    ],
    "vmap": [step(NEST, 4, "error"), step(INTO, Ref(0), 0, Ref(1)), step("m:zero_", Ref(2))],
    "statistics in vmap": [
        step(NEST, 4, "error"),
        step(INTO, Ref(0), 0, Ref(1)),
        step("m:new_ones", Ref(2), [3, 2]),
        step(F + "batch_norm", Ref(3), Ref(2), Ref(2), None, None, True),
    ],
    "an output by position": [step(F + "normalize", Ref(0), 2.0, 1, 1e-12, Ref(0))],
    "numpy's output by position": [step("n:add", Ref(0), 1, Ref(0))],
    "a new output of a registered operator": [
        step("a:aten::max", Ref(0), 0, False, max=Ref(0), max_values=Ref(0))
    ],
    "embeddings that are too long": [
        step("t:torch.zeros", [1], dtype=Named("dtype", "int64")),
        step(F + "embedding", Ref(1), Ref(0), None, 0.0),
    ],
}
ROWS = step("t:torch.tensor", [0, 99])
FAILING = {
    "scatter": [ROWS, step("m:__getitem__", Ref(0), 0), step("m:scatter_", Ref(2), 0, Ref(1), 9.0)],
    "assignment": [ROWS, step("o:setitem", Ref(0), Ref(1), 9.0)],
    "index copy": [
        ROWS,
        step("m:new_zeros", Ref(0), [2, 2]),
        step("m:index_copy_", Ref(0), 0, Ref(1), Ref(2)),
    ],
    "index add": [
        ROWS,
        step("m:new_ones", Ref(0), [2, 2]),
        step("a:aten::index_add_", Ref(0), 0, Ref(1), Ref(2)),
    ],
    "put": [ROWS, step("m:new_zeros", Ref(0), [2]), step("m:put_", Ref(0), Ref(1), Ref(2))],
    "embeddings that are too long": [ROWS, step(F + "embedding", Ref(1), Ref(0), None, 0.5)],
    "masked scatter": [
        step("o:gt", Ref(0), -1),
        step("m:new_zeros", Ref(0), [3]),
        step("m:masked_scatter_", Ref(0), Ref(1), Ref(2)),
    ],
    "an output that is given": [
        ROWS,
        step("m:new_zeros", Ref(0), [2, 2]),
        step("t:torch.index_copy", Ref(0), 0, Ref(1), Ref(2), out=Ref(0)),
    ],
}


@pytest.mark.parametrize("steps", [*WRITING.values(), *FAILING.values()], ids=[*WRITING, *FAILING])
def test_weights_are_as_sent_when_a_program_wrote_to_them(steps: list[Any]) -> None:
    """Those of another function of the namespace, too: the worker has one copy."""
    w = torch.arange(1.0, 9.0).view(4, 2)
    worker = LocalWorker(w)
    with worker.connect() as caller:
        described = weight(worker.weights, 0, w)
        with suppress(CallFailed):
            caller.call(program(*steps, output=[1]), described)
        assert torch.equal(caller.call(LOOK, described).outputs[0], w)


@pytest.mark.parametrize("steps", FAILING.values(), ids=FAILING)
def test_writing_of_a_failed_step_is_seen_when_it_is_one_of_several(steps: list[Any]) -> None:
    """As in a group of calls, whose programs run in parts."""
    what = program(*steps, output=[1])
    built = BuiltProgram("d", what, TABLE)
    w = torch.arange(1.0, 9.0).view(4, 2)
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
        built.some_steps(ProgramPart(1, what.steps, what.output))([w], ())
    assert version(w) > 0


def test_inputs_that_were_undone_leave_an_image_changed() -> None:
    spec = read_spec("float32", [2], [1], 0)
    own, of_image = torch.zeros(2), torch.zeros(2)
    image: Any = object()
    given = [
        TensorInput(0, own, InputStorage(own.untyped_storage()), spec),
        TensorInput(1, of_image, InputStorage(of_image.untyped_storage(), image=image), spec),
    ]
    inputs = Inputs([own, of_image], given, None)
    own.add_(1)
    of_image.add_(1)
    inputs.note_restored()
    assert [entry.position for entry in inputs.changed()] == [1]


# --- programs that only read --------------------------------------------------------------------


def reads_only(operator: str, *arguments: Any, **named: Any) -> bool:
    what = program(step(operator, *arguments, **named), inputs=5, output=[Ref(5)])
    return BuiltProgram("d", what, TABLE).reads_only


IN_PLACE = {
    "relu": 1, "relu6": 1, "selu": 1, "silu": 1, "mish": 1, "hardsigmoid": 1, "hardswish": 1,
    "elu": 2, "leaky_relu": 2, "hardtanh": 3, "dropout": 3,
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), IN_PLACE.items())
def test_program_does_more_than_read_when_it_works_in_place(name: str, place: int) -> None:
    before = [Ref(0), 0.5, False][:place]
    assert reads_only(F + name, *before)
    for off in (False, None):
        assert reads_only(F + name, *before, off)
        assert reads_only(F + name, *before, inplace=off)
    for on in (True, 1, Ref(1)):
        assert not reads_only(F + name, *before, on)
        assert not reads_only(F + name, *before, inplace=on)


def test_program_does_more_than_read_when_statistics_are_kept() -> None:
    stats = (Ref(1), Ref(2), None, None)
    for training in (True, Ref(3)):
        assert not reads_only(F + "batch_norm", Ref(0), *stats, training)
        assert not reads_only(F + "batch_norm", Ref(0), *stats, training=training)
        native = (Ref(0), None, None, Ref(1), Ref(2), training, 0.1, 1e-5, False)
        assert not reads_only("t:torch.batch_norm", *native)
        assert not reads_only("a:aten::batch_norm.default", *native)
    assert reads_only(F + "batch_norm", Ref(0), *stats)
    assert reads_only(F + "batch_norm", Ref(0), *stats, False)
    assert not reads_only(F + "instance_norm", Ref(0), Ref(1), Ref(2))
    assert reads_only(F + "instance_norm", Ref(0), None, None, Ref(1), Ref(2))


def test_program_does_more_than_read_when_an_output_is_given() -> None:
    assert not reads_only("t:torch.add", Ref(0), Ref(1), out=Ref(2))
    assert not reads_only(F + "normalize", Ref(0), 2.0, 1, 1e-12, Ref(1))
    assert not reads_only("t:torch.norm", Ref(0), 2, 0, False, Ref(1))
    assert reads_only("t:torch.norm", Ref(0), 2, 0, False)


def test_numpys_functions_take_no_output_when_it_comes_by_position() -> None:
    add, total = TABLE.find("n:add"), TABLE.find("n:sum")
    assert add is not None
    assert total is not None
    with pytest.raises(ValueError, match="output"):
        add(ones(2), 1, ones(2))
    with pytest.raises(ValueError, match="output"):
        total(ones(2), 0, None, ones())
    assert add(ones(2), 1, None).tolist() == [2.0, 2.0]
