"""Expressions of a source file that name a GPU, found without running the file."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping

# A dotted name for an expression, or None.
Resolve = Callable[[ast.expr], str | None]

_GPU_TEXT = re.compile(r"(?:torch\.)?cuda(?:$|:(\d+)$|\.\w+Tensor$)")
_PASSES = 3  # a name may be assigned another name


class DeviceValues:
    """GPU indices of expressions: 0 for a GPU without a number, None for no GPU."""

    def __init__(self, tree: ast.Module, resolve: Resolve) -> None:
        self._resolve = resolve
        self._assigned: dict[str, int | None] = {}
        assigned = list(_assigned(tree))
        for _ in range(_PASSES):
            found: dict[str, int | None] = {}
            for name, value in assigned:
                index = self.index(value)
                known = found.get(name)
                found[name] = index if known is None else max(known, index or 0)
            self._assigned = found

    def index(self, value: ast.expr, *, numbers: bool = False) -> int | None:
        """The GPU of an expression; with `numbers`, a bare number is a GPU."""
        match value:
            case ast.Constant(value=str(text)):
                return _index_of_text(text)
            case ast.Constant(value=int(number)) if numbers and not isinstance(number, bool):
                return number
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                return 0 if text.startswith("cuda") else None
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._of_name(name)
            case ast.Call(func=called, args=[first, *more]) if self._makes_device(called):
                index = self.index(first, numbers=True)
                second = self.index(more[0], numbers=True) if more else None
                return index if index is None else max(index, second or 0)
            case _:
                pass
        parts = [self.index(part, numbers=numbers) for part in _parts(value)]
        return max((part for part in parts if part is not None), default=None)

    def _makes_device(self, called: ast.expr) -> bool:
        return self._resolve(called) in {"torch.device", "torch.cuda.device"}

    def _of_name(self, name: str) -> int | None:
        if name in self._assigned:
            return self._assigned[name]
        return 0 if name == "device" or name.endswith("_device") else None


def _index_of_text(text: str) -> int | None:
    match = _GPU_TEXT.match(text)
    return int(match[1] or 0) if match else None


def _parts(value: ast.expr) -> list[ast.expr]:
    """The subexpressions that may be the value or its elements."""
    match value:
        case ast.IfExp(body=one, orelse=other):
            return [one, other]
        case ast.BoolOp(values=values) | ast.List(elts=values) | ast.Tuple(elts=values):
            return values
        case ast.Dict(values=values):
            return values
        case _:
            return []


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names and attributes that are assigned a value, with the value."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((name, value) for target in targets for name in _name_of(target))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from ((name, value) for name in _name_of(target))
            case ast.NamedExpr(target=target, value=value):
                yield target.id, value
            case ast.arguments() as parameters:
                yield from _defaults(parameters).items()
            case _:
                pass


def _name_of(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case _:
            return []


def _defaults(parameters: ast.arguments) -> Mapping[str, ast.expr]:
    """Parameters with a default other than None."""
    positional = [*parameters.posonlyargs, *parameters.args]
    pairs = [
        *zip(reversed(positional), reversed(parameters.defaults), strict=False),
        *zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True),
    ]
    return {
        parameter.arg: value
        for parameter, value in pairs
        if value is not None and not (isinstance(value, ast.Constant) and value.value is None)
    }
