"""Which models a function's calls use, as its runtime reports them; pure."""

import string
from collections import deque
from collections.abc import Sequence

from cache_manager.model import ModelId
from gateway_ext.model import FunctionId

# A model is known by the beginning of its digest, in the namespace of its function.
_DIGITS = 20
_RECENT = 4
_MOST_MODELS = 16
_HEX = frozenset(string.hexdigits)


class Learned:
    """What is expected of the next call: the models that each of the latest calls has used.

    A function whose calls differ has fewer than it will use, or none: what is not expected, the
    call asks for by itself, which costs less than a model that is brought for nothing.
    """

    __slots__ = ("models", "_function", "_recent", "_said")

    def __init__(self, function: FunctionId, declared: Sequence[str] = ()) -> None:
        self._function = function
        self._recent: deque[frozenset[ModelId]] = deque(maxlen=_RECENT)
        self._said = b""
        self.models = self._ids(declared)

    def saw(self, said: bytes) -> None:
        """A call reports the digests that it used; one that used none says nothing."""
        recent = self._recent
        if said == self._said and len(recent) == _RECENT and all(r == recent[0] for r in recent):
            return
        digests = said.decode("latin-1").split(",")
        models = self._ids([digest.strip() for digest in digests])
        if not models:
            return
        self._said = said
        self._recent.append(frozenset(models))
        self.models = tuple(model for model in models if all(model in one for one in self._recent))

    @property
    def known(self) -> bool:
        """Whether calls, or whoever deployed it, have said anything since it was forgotten."""
        return bool(self.models or self._recent)

    def forget(self) -> None:
        """Whoever has the models does not know them any more."""
        self._recent.clear()
        self._said = b""
        self.models = ()

    def _ids(self, digests: Sequence[str]) -> tuple[ModelId, ...]:
        found = [
            ModelId(f"{self._function.namespace}/{digest[:_DIGITS].lower()}")
            for digest in digests[:_MOST_MODELS]
            if len(digest) >= _DIGITS and _HEX.issuperset(digest)
        ]
        return tuple(dict.fromkeys(found))
