"""What can go wrong in the pieces that every folder shares.

CommonError
├── BadSize              a text that is no size
├── BadAddress           a text that is no address
├── NoResponse           an HTTP peer broke off; `sent`: bytes of the request may have reached it
└── StreamRefused        a server answered with this status instead of beginning a stream
"""


class CommonError(Exception):
    """Base of every error that `common` raises."""


class BadSize(CommonError):
    """The text names no number of bytes."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"not a size: {text!r}; for example 512MiB, 8GiB or 2g")


class BadAddress(CommonError):
    """The text is no address to connect to or to listen on."""

    def __init__(self, text: str, wanted: str) -> None:
        self.text = text
        super().__init__(f"not an address: {text!r}; {wanted}")


class NoResponse(CommonError):
    """An HTTP peer broke off; `sent` is true if a byte of the request may have reached it."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class StreamRefused(CommonError):
    """A server answered with this HTTP status instead of beginning a stream."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"the server answered {status} {why}".rstrip())
        self.status = status
