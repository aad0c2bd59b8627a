"""Finds uses of CUDA in the syntax tree of a source file."""

import ast
from collections.abc import Iterator

from gpufaas.check.device_values import DeviceValues
from gpufaas.check.findings import Finding, UseRule
from gpufaas.check.torch_names import (
    DEVICE_KEYWORDS,
    DEVICE_METHODS,
    OTHER_GPU,
    PACKAGES,
    REDIRECTED,
    RULES,
    rule_of,
)

_LONGEST = 40
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception"})
# Functions that take a GPU's number.
_NUMBERED = frozenset({"torch.cuda.set_device", "torch.cuda.device", "torch.device"})


def uses_in(file: str, tree: ast.Module) -> list[Finding]:
    """The uses of CUDA in a file, ordered by line."""
    reader = _UseFinder(file, tree)
    reader.visit(tree)
    return sorted(reader.found, key=lambda finding: finding.line)


class _UseFinder(ast.NodeVisitor):
    """Visits one file; an import defines a name for the whole file."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.found: list[Finding] = []
        self._file = file
        self._imports = dict(_imported_names(tree))
        self._devices = DeviceValues(tree, self._resolve)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._package(node, name.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            for name in node.names:
                self._package(node, f"{node.module}.{name.name}")

    def visit_Try(self, node: ast.Try) -> None:
        """Skip imports whose failure the program catches."""
        optional = any(_catches_import(handler) for handler in node.handlers)
        for statement in node.body:
            if not (optional and isinstance(statement, ast.Import | ast.ImportFrom)):
                self.visit(statement)
        for rest in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(rest)

    def visit_If(self, node: ast.If) -> None:
        """Skip code for type checkers."""
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """Skip annotations."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name is given

    def visit_Name(self, node: ast.Name) -> None:
        self._torch_name(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._torch_name(node):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and self._devices.index(node):
            self._other_gpu(node, repr(node.value))

    def visit_Call(self, node: ast.Call) -> None:
        name = self._resolve(node.func)
        if not ((name is not None and self._by_keyword(node, name)) or self._by_device(node, name)):
            self._by_method(node, name)
            self.visit(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)

    def _resolve(self, node: ast.expr) -> str | None:
        """An expression's dotted name by the file's imports; None if it has none."""
        match node:
            case ast.Name(id=name):
                return self._imports.get(name)
            case ast.Attribute(value=owner, attr=name):
                before = self._resolve(owner)
                return None if before is None else f"{before}.{name}"
            case _:
                return None

    def _torch_name(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether this is a name of PyTorch, which is added if a rule exists for it."""
        name = self._resolve(node)
        if name is None or not name.startswith("torch."):
            return False
        rule = rule_of(name)
        if rule is not None and name != "torch.cuda":  # a reference to the module is no use
            self._add(node, name, rule)
        return True

    def _by_keyword(self, node: ast.Call, name: str) -> bool:
        """Whether a rule for one of the call's keywords applies."""
        for keyword in node.keywords:
            rule = RULES.get(f"{name}({keyword.arg})")
            if rule is not None and not _is_false(keyword.value):
                self._add(node, f"{name}({keyword.arg}={ast.unparse(keyword.value)})", rule)
                return True
        return False

    def _by_method(self, node: ast.Call, name: str | None) -> None:
        """Add a method that has a rule for any object."""
        if name is None and isinstance(node.func, ast.Attribute):
            rule = RULES.get(f".{node.func.attr}()")
            if rule is not None:
                self._add(node, _shown(node), rule)

    def _by_device(self, node: ast.Call, name: str | None) -> bool:
        """Add a call with a GPU as argument; whether that GPU does not exist."""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        moves = name is None and method in DEVICE_METHODS
        numbers = name in _NUMBERED or moves
        indices: list[int | None] = [0] if moves and method == "cuda" else []
        if moves or (name or "").startswith("torch."):
            indices += [self._devices.index(given, numbers=numbers) for given in node.args]
        for keyword in node.keywords:
            if keyword.arg == "device_map" and _places_on_gpu(keyword.value):
                indices.append(0)
            elif keyword.arg in DEVICE_KEYWORDS:
                indices.append(self._devices.index(keyword.value, numbers=True))
        named = [index for index in indices if index is not None]
        if any(named):
            self._other_gpu(node, _shown(node))
            return True
        if named and (name is None or rule_of(name) is None):
            self._add(node, _shown(node), REDIRECTED)
        return False

    def _other_gpu(self, node: ast.expr, what: str) -> None:
        """Add a use of another GPU, once a line, because parts of an expression repeat the GPU."""
        if not any(f.line == node.lineno and f.rule is OTHER_GPU for f in self.found):
            self._add(node, what, OTHER_GPU)

    def _package(self, node: ast.stmt, name: str) -> None:
        parts = name.split(".")
        beginnings = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        for package in sorted(beginnings & PACKAGES):
            self._add(node, f"import {package}", RULES[package])

    def _add(self, node: ast.expr | ast.stmt, what: str, rule: UseRule) -> None:
        self.found.append(Finding(self._file, node.lineno, what, rule))


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Imported names with their dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                whole = name.name if name.asname else name.name.partition(".")[0]
                yield name.asname or whole, whole
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def _catches_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(
        isinstance(part, ast.Name) and part.id in _IMPORT_ERRORS for part in ast.walk(handler.type)
    )


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def _places_on_gpu(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value not in {None, "cpu"}


def _shown(node: ast.Call) -> str:
    """The call's source text, shortened to its method and its device arguments."""
    text = ast.unparse(node)
    if len(text) <= _LONGEST:
        return text
    called = ast.unparse(node.func)
    name = called if len(called) < _LONGEST // 2 else f".{called.rpartition('.')[2]}"
    given = [ast.unparse(argument) for argument in (*node.args, *node.keywords)]
    whole = f"{name}({', '.join(given)})"
    if len(whole) <= _LONGEST:
        return whole
    devices = [part for part in given if part.partition("=")[0] in DEVICE_KEYWORDS]
    return f"{name}({', '.join(['...', *devices])})"
