"""The users that a gateway with root's rights gives to functions and builds."""

import logging
from collections.abc import Collection
from typing import Self

from gateway_ext.providers.process.process_settings import ProcessProviderSettings
from gateway_ext.providers.process.users.ended_users import EndedUsers
from gateway_ext.providers.process.users.user_ids import UserIds

log = logging.getLogger(__name__)

_LOCKS = "users.lock"  # in the state folder


class MachineUsers:
    """Ids of both kinds, and the way to end all processes of one."""

    def __init__(self, functions: UserIds, builds: UserIds) -> None:
        self.functions = functions
        self.builds = builds
        self._own_uid = builds.take()
        self._ended = EndedUsers(self._own_uid)

    @classmethod
    def of(cls, settings: ProcessProviderSettings) -> Self:
        """Open the locks of this machine; without a place for them those of the state folder."""
        locks = settings.user_locks
        try:
            functions = UserIds(locks, settings.first_uid, settings.uids)
        except OSError as error:
            text = "other gateways of this machine may use the same user ids: %s"
            log.warning(text, error)
            locks = settings.state / _LOCKS
            functions = UserIds(locks, settings.first_uid, settings.uids)
        return cls(functions, UserIds(locks, settings.first_build_uid, settings.build_uids))

    def end(self, uids: Collection[int]) -> None:
        """Kill all processes of users that this gateway holds; ProviderFailed if one is left."""
        self._ended.end(uids)

    def close(self) -> None:
        """End all processes of all users, then give their ids back."""
        try:
            self.end((self.functions.held | self.builds.held) - {self._own_uid})
        finally:
            self.functions.close()
            self.builds.close()
