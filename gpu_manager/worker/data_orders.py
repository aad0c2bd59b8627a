"""The orders between the manager and its workers about data that functions put with them."""

from typing import NamedTuple


class HandOver(NamedTuple):
    """Manager to worker, with a descriptor of memory: copy the data that you have there.

    Functions put it by this handle.
    """

    model: int
    handle: str
    size_bytes: int


class HandedOver(NamedTuple):
    """Worker to manager: the data was copied; or it could not be, since it is not here."""

    model: int
    handle: str
    done: bool


class WithdrawData(NamedTuple):
    """Manager to worker: no call takes the data of this handle any more."""

    model: int
    handle: str


class LendData(NamedTuple):
    """Manager to worker: let another process open the data of this handle, until it is given back.

    Each of these is answered once, and counts as one use.
    """

    model: int
    handle: str


class DataLent(NamedTuple):
    """Worker to manager, with a descriptor unless there is a token: how the data is opened.

    It begins at `offset`, and another process finds what is there by the driver's `token`. It may
    not be here, or not on the device: then it is not `done`.
    """

    model: int
    handle: str
    done: bool
    size_bytes: int
    offset: int
    token: bytes


class BorrowData(NamedTuple):
    """Worker to manager: a function wants to use data by this handle, which is not here."""

    model: int
    handle: str


class DataBorrowed(NamedTuple):
    """Manager to worker: the answer, as DataLent has it; not `done` if the data cannot be lent.

    `about` is for its reader. Data on the `same_gpu` may be used where it is.
    """

    model: int
    handle: str
    done: bool
    size_bytes: int
    offset: int
    token: bytes
    about: bytes
    same_gpu: bool


class DataGivenBack(NamedTuple):
    """Borrower to manager, and manager to lender: borrowed data is used once less."""

    model: int
    handle: str


class GrantData(NamedTuple):
    """Manager to worker: so much more of this model may be put without asking, set aside for it.

    A handle is a secret, of so many random bytes, with something `before` and `behind` it.
    """

    model: int
    before: str
    secret_bytes: int
    behind: str
    size_bytes: int
    pieces: int


class RecallGrant(NamedTuple):
    """Manager to worker: nothing more is put without asking; say what is left of the grants."""

    model: int


class GrantLeft(NamedTuple):
    """Worker to manager: the answer to RecallGrant, behind everything that was put before."""

    model: int
    size_bytes: int
    pieces: int


class DataPut(NamedTuple):
    """Worker to manager: a session has put data, for so many seconds, or for the usual time."""

    model: int
    session: str
    handle: str
    size_bytes: int
    about: bytes
    lifetime_s: list[float]


DataOrder = (
    HandOver
    | HandedOver
    | WithdrawData
    | LendData
    | DataLent
    | BorrowData
    | DataBorrowed
    | DataGivenBack
    | GrantData
    | RecallGrant
    | GrantLeft
    | DataPut
)
