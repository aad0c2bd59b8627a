"""A function's server in the test's own process: its end, in whatever moment it comes."""

import socket

import pytest

from gateway_ext.runtime.server import FunctionServer
from gateway_ext.runtime.settings import RuntimeSettings


@pytest.mark.parametrize("is_ready", [False, True])
def test_server_that_is_told_to_end_before_it_listens_ends(*, is_ready: bool) -> None:
    service = FunctionServer(RuntimeSettings())
    service.start()
    if is_ready:
        service.ready(lambda *_: "")
    service.stop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service.listen(listener)
        assert service.wait()
    service.stop()
