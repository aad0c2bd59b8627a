"""Python's garbage collector rests while a large package is imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing inside the `with` block, which makes objects that stay.

    The collector would look at them again and again: a fifth of the import of torch or Dynamo.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
