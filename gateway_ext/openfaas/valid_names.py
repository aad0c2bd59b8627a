"""Valid names of functions, secrets and namespaces, and how paths and bodies name functions."""

import re

from gateway_ext.errors import BadRequest
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId

_PLAIN = re.compile(r"[a-zA-Z0-9_][-a-zA-Z_0-9]*")
_DOTTED = re.compile(r"[a-zA-Z0-9_][-a-zA-Z_0-9.]*")
_LONGEST = 63  # a DNS label: what Kubernetes takes, and short enough for a socket's path


def function_id(name: str, namespace: str = "") -> FunctionId:
    """Parse `NAME`, or `NAME.NAMESPACE` where no namespace is given."""
    if "." in name:
        name, _, suffix = name.partition(".")
        function = FunctionId(namespace_name(suffix), function_name(name))
        if namespace and suffix != namespace:
            raise BadRequest(f"{function} is not in the namespace {namespace!r}")
        return function
    return new_function_id(name, namespace)


def new_function_id(name: str, namespace: str = "") -> FunctionId:
    """A dot in the name of a function that is to be deployed would be a namespace."""
    return FunctionId(namespace_or_default(namespace), function_name(name))


def function_name(name: str) -> str:
    return _checked("function", name, _PLAIN)


def namespace_name(name: str) -> str:
    return _checked("namespace", name, _PLAIN)


def namespace_or_default(name: str) -> str:
    return namespace_name(name or DEFAULT_NAMESPACE)


def secret_name(name: str) -> str:
    """The secret's name becomes a file's name, and dots are usual."""
    return _checked("secret", name, _DOTTED)


def workflow_name(what: str, name: str) -> str:
    """The name, if it is valid for a workflow, one of its stages, or its namespace."""
    return _checked(what, name, _PLAIN)


def _checked(what: str, name: str, form: re.Pattern[str]) -> str:
    if not name:
        raise BadRequest(f"the {what}'s name is missing")
    if len(name) > _LONGEST:
        raise BadRequest(
            f"the {what} name {name[:_LONGEST]!r}... is longer than {_LONGEST} letters"
        )
    if form.fullmatch(name):
        return name
    if form is _PLAIN and _DOTTED.fullmatch(name):
        raise BadRequest(
            f"the {what} name {name!r} may not contain a dot: in NAME.NAMESPACE it ends the name"
        )
    raise BadRequest(f"the {what} name {name!r} may have letters, digits, - and _ only")
