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


DataOrder = (
    HandOver
    | HandedOver
    | WithdrawData
    | LendData
    | DataLent
    | BorrowData
    | DataBorrowed
    | DataGivenBack
)
