"""The terms that callers tell of their functions: they hold as long as a caller tells them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.model.errors import BadValue
from scheduler.model.terms_bounds import check_owner, check_terms, is_function
from scheduler.service.tenants.terms_book import TermsBook
from scheduler.wire.caller_stream import ToldTerms

log = logging.getLogger(__name__)

# What a caller told is kept for this long after its stream: a gateway may start again meanwhile.
KEPT_S = 60.0


class CallersTerms:
    """Takes what callers tell into one leader's book, and forgets it some time after they left."""

    def __init__(self, book: TermsBook) -> None:
        self._book = book
        self._streams: Counter[str] = Counter()
        self._is_full = False

    @contextmanager
    def present(self, caller: str) -> Iterator[None]:
        """Count a stream of this caller."""
        self._streams[caller] += 1
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(KEPT_S, self._left, caller)

    def take(self, caller: str, told: ToldTerms) -> None:
        """Take one message in; BadValue if it is out of bounds, and then nothing of it is taken."""
        for each in told.functions:
            if not is_function(check_owner(each.function)):
                raise BadValue("a caller tells the terms of functions, not of namespaces")
            if each.terms is not None:
                check_terms(each.terms)
        if told.begins:
            named = {each.function for each in told.functions}
            for function in self._book.told_by(caller):
                if function not in named:
                    self._book.tell(caller, function, None)
        for each in told.functions:
            if not self._book.tell(caller, each.function, each.terms) and not self._is_full:
                self._is_full = True
                log.warning("%s: too many functions have terms of their own", each.function)

    def _left(self, caller: str) -> None:
        self._streams[caller] -= 1
        if not self._streams[caller]:
            del self._streams[caller]
            self._book.forget(caller)
