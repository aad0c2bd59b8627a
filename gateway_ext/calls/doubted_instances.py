"""Instances in which a call broke off: each gets its next call only once it has answered.

A process that ends may close the connection of its last call before the socket that it listens on.
A call that connects in between could not be told from one that has begun, and must not be repeated.
So a health request goes first: it may fail and be repeated.
"""

from common.errors import NoResponse
from common.http.client import HttpClient
from gateway_ext.calls.function_table import Instance

_HEALTH = b"GET /_/health HTTP/1.1\r\nhost: function\r\n\r\n"


async def until_it_answers(client: HttpClient, instance: Instance) -> None:
    """Return once the instance is not doubted; NoResponse, with nothing sent, if it has ended."""
    while doubted_since_s := instance.doubted_since_s:
        await _ask(client, instance.address)
        if instance.doubted_since_s == doubted_since_s:
            instance.doubted_since_s = 0.0


async def _ask(client: HttpClient, address: str) -> None:
    """Any answer will do; its connection is kept if the whole answer came with its head."""
    connection = client.idle(address) or await client.connect(address)
    try:
        await connection.ask(_HEALTH)
    except NoResponse as error:
        raise NoResponse(str(error), sent=False) from error
    finally:
        connection.let_go()
