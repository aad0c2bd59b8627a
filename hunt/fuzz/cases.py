"""What is called with what: every name that programs may use; cases follow from numbers."""

import functools
import importlib
import inspect
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import get_testing_overrides

from hunt.fuzz.arguments import TensorArgument, changed, made, restored
from hunt.fuzz.recording import SEEDS

importlib.import_module("torchvision")  # registers its operators

_INDICES = ("ind", "offset", "target", "length", "batch_sizes", "bins", "segment", "batch1")
_MOST_CHANGES = 3
_SHAPES = ((2, 3), (4,), (2, 3, 4), (1, 4, 6, 6), (3, 3), (0, 3), ())


class Case(NamedTuple):
    """One call: the number makes its arguments."""

    name: str
    number: int


class Table(Protocol):
    """What names operators, as a worker's table does."""

    def names(self) -> list[str]:
        """Every name."""

    def find(self, name: str) -> Callable[..., Any] | None:
        """What one stands for."""


class Cases:
    """The names of a table, and the arguments of their cases."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.names = sorted(name for name in table.names() if name[0] in "tmao")
        self._seeds: dict[str, list[Any]] = defaultdict(list)
        self._by_short: dict[str, list[Any]] = defaultdict(list)
        for line in SEEDS.read_text(encoding="utf-8").splitlines():
            name, arguments, named = json.loads(line)
            seed = (restored(arguments), {key: restored(value) for key, value in named.items()})
            self._seeds[name].append(seed)
            self._by_short[_short(name)].append(seed)

    def described(self, case: Case) -> tuple[list[Any], dict[str, Any], random.Random]:
        """The arguments, with tensors still to be made, and the chance that makes those."""
        chance = random.Random(f"{case.name}:{case.number}")
        seeds = self._found(case.name)
        if case.number < len(seeds):
            return (*seeds[case.number], chance)
        if not seeds or chance.random() < 0.1:
            arguments, named = _from_signature(case.name, self.table, chance)
        else:
            arguments, named = chance.choice(seeds)
        for _ in range(chance.randrange(1, _MOST_CHANGES + 1)):
            arguments, named = changed([arguments, named], chance)
        return arguments, named, chance

    def call(self, case: Case) -> tuple[Any, list[Any]]:
        """What the operator gives, and the arguments, to which it may have written."""
        arguments, named, chance = self.described(case)
        ready, keywords = made(arguments, chance), made(named, chance)
        torch.manual_seed(case.number)
        found = self.table.find(case.name)
        assert found is not None
        return found(*ready, **keywords), [ready, keywords]

    def _found(self, name: str) -> list[Any]:
        return self._seeds.get(name) or self._by_short.get(_short(name), [])


def _short(name: str) -> str:
    """What `m:add_`, `t:torch.add`, `a:aten::add.Tensor` and `o:add` have in common."""
    kind, _, rest = name.partition(":")
    if kind == "a":
        rest = rest.partition("::")[2].partition(".")[0]
    rest = rest.rpartition(".")[2]
    return rest if rest.startswith("__") else rest.rstrip("_")


def _from_signature(name: str, table: Table, chance: random.Random) -> Any:
    schema = _schema_of(name, chance)
    if schema is not None:
        return _by_schema(schema, chance)
    return [_by_name(parameter, chance) for parameter in _parameters(table.find(name))], {}


def _schema_of(name: str, chance: random.Random) -> Any:
    """The schema of a registered operator, or one of those that bear the same name."""
    space, _, rest = name.rpartition("::")
    short, _, overload = rest.partition(".") if space else (_short(name), "", "")
    packet = getattr(getattr(torch.ops, space[2:] or "aten"), short, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 - torch has no other name
        return None
    chosen = overload or chance.choice(packet.overloads())  # type: ignore[no-untyped-call] # torch gives it no types
    return getattr(packet, chosen)._schema  # noqa: SLF001 - as above


def _by_schema(schema: Any, chance: random.Random) -> Any:
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    shape = chance.choice(_SHAPES)
    for argument in schema.arguments:
        value = _of_type(str(argument.type), argument.name, shape, chance)
        if argument.has_default_value() and chance.random() < 0.5:
            if argument.kwarg_only:
                continue
            value = argument.default_value
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            arguments.append(value)
    return arguments, named


def _of_type(kind: str, name: str, shape: tuple[int, ...], chance: random.Random) -> Any:
    if kind.startswith("Optional["):
        return None if chance.random() < 0.4 else _of_type(kind[9:-1], name, shape, chance)
    if kind.startswith("List["):
        count = chance.randrange(1, 4)
        return [_of_type(kind[5:-1], name, shape, chance) for _ in range(count)]
    if kind == "Tensor":
        return _tensor_for(name, shape, chance)
    makers: dict[str, Any] = {
        "int": lambda: chance.choice((0, 1, 2, 3, -1)),
        "SymInt": lambda: chance.choice((0, 1, 2, 3, -1)),
        "float": lambda: chance.choice((0.5, 1.0, 0.0)),
        "number": lambda: chance.choice((1, 2.0, 0)),
        "bool": lambda: chance.random() < 0.5,
        "str": lambda: chance.choice(("mean", "sum", "none")),
    }
    return makers.get(kind, lambda: None)()


def _tensor_for(name: str, shape: tuple[int, ...], chance: random.Random) -> TensorArgument:
    if any(word in name for word in _INDICES):
        values = tuple(chance.randrange(-1, 4) for _ in range(4))
        return TensorArgument("int64", shape, values)
    if "mask" in name:
        return TensorArgument("bool", shape)
    if chance.random() < 0.2:
        shape = chance.choice(_SHAPES)
    return TensorArgument(chance.choice(("float32",) * 4 + ("float64", "int64")), shape)


@functools.cache
def _testing_overrides() -> dict[Any, Any]:
    return dict(get_testing_overrides())


def _parameters(found: Any) -> Iterator[str]:
    """The names of the parameters without a default, and some with one."""
    try:
        stand_in = _testing_overrides().get(found, found)
        parameters = inspect.signature(stand_in).parameters.values()
    except (TypeError, ValueError):
        yield from ("input", "other")
        return
    for number, parameter in enumerate(parameters):
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        if parameter.default is parameter.empty or number < 4:
            yield parameter.name


def _by_name(name: str, chance: random.Random) -> Any:
    if name in {
        "dim",
        "size",
        "n",
        "k",
        "axis",
        "kernel_size",
        "num_classes",
        "groups",
        "diagonal",
    }:
        return chance.choice((0, 1, 2, -1, [1, 2]))
    if chance.random() < 0.2:
        return chance.choice((None, 1, 2.0, True))
    return _tensor_for(name, chance.choice(_SHAPES), chance)
