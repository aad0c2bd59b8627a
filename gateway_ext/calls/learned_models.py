"""Which models a function's calls use, as its runtime reports them; pure."""

import string
from collections import deque
from collections.abc import Sequence

from cache_manager.model.ids import ModelId
from gateway_ext.model import FunctionId

# A model's id begins with its digest's first characters, in the namespace of its function.
_DIGITS = 20
_RECENT = 4
_MOST_MODELS = 16
_HEX = frozenset(string.hexdigits)


class Learned:
    """The models that the next call is expected to use: those that each of the latest calls used.

    For a function whose calls differ these are fewer models than a call will use, or none: a call
    asks for a missing model by itself, which costs less than loading a model that is not used.
    """

    __slots__ = ("models", "_function", "_recent", "_last_report")

    def __init__(self, function: FunctionId, declared: Sequence[str] = ()) -> None:
        self._function = function
        self._recent: deque[frozenset[ModelId]] = deque(maxlen=_RECENT)
        self._last_report = b""
        self.models = self._ids(declared)

    def saw(self, report: bytes) -> None:
        """Take the digests that a call reports; a call without models reports none."""
        recent = self._recent
        if (
            report == self._last_report
            and len(recent) == _RECENT
            and all(r == recent[0] for r in recent)
        ):
            return
        digests = report.decode("latin-1").split(",")
        models = self._ids([digest.strip() for digest in digests])
        if not models:
            return
        self._last_report = report
        self._recent.append(frozenset(models))
        self.models = tuple(model for model in models if all(model in one for one in self._recent))

    @property
    def known(self) -> bool:
        """Whether a call or the deployment has named models since the last `forget`."""
        return bool(self.models or self._recent)

    @property
    def reported(self) -> bool:
        """Whether calls have named the models, which then are the function's word alone."""
        return bool(self._recent)

    def forget(self) -> None:
        """The scheduler no longer knows the models: expect none until a call reports them again."""
        self._recent.clear()
        self._last_report = b""
        self.models = ()

    def _ids(self, digests: Sequence[str]) -> tuple[ModelId, ...]:
        found = [
            ModelId(f"{self._function.namespace}/{digest[:_DIGITS].lower()}")
            for digest in digests[:_MOST_MODELS]
            if len(digest) >= _DIGITS and _HEX.issuperset(digest)
        ]
        return tuple(dict.fromkeys(found))
