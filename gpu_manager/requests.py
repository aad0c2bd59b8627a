"""What clients ask after HELLO: which requests there are for each role, and who answers them."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpu_manager import fields as read
from gpu_manager.greeting import Role
from gpu_manager.services import Services
from gpu_manager.sessions import Session
from gpu_manager.weight_requests import WeightRequests
from torch_shim.errors import BadFrame
from torch_shim.protocol import Kind
from torch_shim.wire import Frame


@dataclass(slots=True)
class Answer:
    """Fields, with descriptors and sockets that are closed once they are sent."""

    fields: dict[str, Any]
    copies: Sequence[int] = ()
    ends: Sequence[socket.socket] = field(default=())

    @property
    def descriptors(self) -> list[int]:
        """What goes with the answer."""
        return [*self.copies, *(end.fileno() for end in self.ends)]

    def close(self) -> None:
        """The client has its own copies now, or is gone."""
        for copy in self.copies:
            os.close(copy)
        for end in self.ends:
            end.close()


class Handler(Protocol):
    """Answers the requests of one connection."""

    def waits(self, frame: Frame) -> bool:
        """Whether a request may have to wait, so that others are answered meanwhile."""
        ...

    async def handle(self, frame: Frame) -> Answer | None:
        """Do what a frame asks; None where there is nothing to answer."""
        ...

    def close(self) -> None:
        """The connection is closed."""
        ...


class ShimHandler:
    """A function process: weights and GPU time."""

    def __init__(self, session: Session, services: Services, *, local: bool) -> None:
        self._session = session
        self._acquiring = services.acquiring
        self._weights = WeightRequests(services.library, session)
        self._local = local

    def waits(self, frame: Frame) -> bool:
        """Weights are hashed, and GPU time is waited for; pieces of weights keep their order."""
        whole = frame.kind is Kind.UPLOAD and bool(frame.descriptors)
        return whole or frame.kind in {Kind.PROVE, Kind.ACQUIRE}

    async def handle(self, frame: Frame) -> Answer | None:
        """Do what a frame asks."""
        _, fields = read.request(frame.meta)
        if frame.kind is Kind.ACQUIRE:
            answer, ends = await self._acquiring.acquire(self._session, fields, local=self._local)
            return Answer(answer, ends=ends)
        if frame.kind is Kind.PROVE:
            answer, copies = await self._weights.prove(fields, local=self._local)
            return Answer(answer, copies)
        if frame.kind is Kind.OFFER:
            return Answer(self._weights.offer(fields))
        if frame.kind is Kind.UPLOAD:
            return Answer(await self._weights.upload(frame, fields))
        if frame.kind is Kind.CHUNK:
            return Answer(await self._weights.chunk(frame, fields))
        if frame.kind is Kind.WHERE:
            return Answer(self._acquiring.where(self._session, fields))
        if frame.kind is Kind.PING:
            return Answer({})
        if frame.kind is Kind.RELEASE:
            self._acquiring.release(self._session, fields)
        elif frame.kind is Kind.CLAIMED:
            self._acquiring.claimed(self._session, fields)
        elif frame.kind is Kind.FORGET:
            self._weights.forget(fields)
        else:
            raise BadFrame(f"{frame.kind.name} is no request of a shim")
        return None

    def close(self) -> None:
        """Drop uploads that came only in part."""
        self._weights.close()


class AdminHandler:
    """An administrator."""

    def __init__(self, services: Services) -> None:
        self._administration = services.administration

    def waits(self, frame: Frame) -> bool:
        """They may wait for the scheduler."""
        return frame.kind is Kind.ADMIN

    async def handle(self, frame: Frame) -> Answer | None:
        """Do what a frame asks."""
        if frame.kind is not Kind.ADMIN:
            raise BadFrame(f"{frame.kind.name} is no request of an administrator")
        _, fields = read.request(frame.meta)
        return Answer(await self._administration.answer(fields))

    def close(self) -> None:
        """Nothing is kept."""


def handler_for(role: Role, session: Session, services: Services, *, local: bool) -> Handler:
    """Who answers a client of this role."""
    if role is Role.ADMIN:
        return AdminHandler(services)
    return ShimHandler(session, services, local=local)
