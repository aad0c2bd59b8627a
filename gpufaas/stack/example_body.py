"""What to send to a function if nothing else is said."""

from pathlib import Path

from gateway_ext.runtime.template.example_calls import BadExample, examples_in
from gpufaas.errors import CommandError


def example_body(handler: Path) -> bytes:
    """The body of the first call in the handler's example.json; none without the file."""
    try:
        calls = examples_in(handler)
    except BadExample as error:
        raise CommandError(f"{handler}: {error}") from error
    return calls[0].body if calls else b""
