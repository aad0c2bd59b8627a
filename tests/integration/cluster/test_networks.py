"""The networks on which the cluster is: what is cut is out of reach, until it is healed."""

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.network.networks import HERE, NameSpaces, Network, NoNetwork
from tests.kit.network.relays import Relays
from tests.kit.processes.daemons import Daemon
from tests.kit.waiting import wait_until

_ASK_S = 0.5


@pytest.fixture(params=["name spaces", "relays"])
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    hosts = ("one", "two")
    found: Network
    if request.param == "relays":
        found = Relays(hosts, lambda _host, _said: HERE)
    else:
        found = NameSpaces(hosts)
    try:
        found.make()
    except NoNetwork as error:
        pytest.skip(f"needs network name spaces: {error}")
    yield found
    found.end()


def test_host_is_out_of_reach_until_it_is_healed_when_it_was_cut_off(
    net: Network, tmp_path: Path
) -> None:
    server = Daemon(net.command("one", *_serve(net)), tmp_path / "log", "Serving HTTP")
    server.start()
    try:
        server.answers()
        with net.inside():
            _until_it_answers(net)
            net.cut("one", HERE)
            assert not _answers(net)
            net.heal()
            _until_it_answers(net)
            net.cut("one", "two")
            _until_it_answers(net)
            net.cut("one")
            assert not _answers(net)
    finally:
        server.kill()


def test_host_is_out_of_reach_one_way_or_slow_until_it_is_healed(tmp_path: Path) -> None:
    net = NameSpaces(("one",))
    try:
        net.make()
    except NoNetwork as error:
        pytest.skip(f"needs network name spaces: {error}")
    server = Daemon(net.command("one", *_serve(net)), tmp_path / "log", "Serving HTTP")
    server.start()
    try:
        server.answers()
        with net.inside():
            for pair in ((HERE, "one"), ("one", HERE)):
                net.cut_one_way(*pair)
                assert not _answers(net)
                net.heal()
                _until_it_answers(net)
            net.slow("one")
            _until_it_answers(net)
            net.heal()
            _until_it_answers(net)
    finally:
        server.kill()
        net.end()


def _serve(net: Network) -> tuple[str, ...]:
    host, _, port = net.listens_at("one").partition(":")
    return (sys.executable, "-u", "-m", "http.server", "--bind", host, port)


def _until_it_answers(net: Network) -> None:
    """A busy machine may take longer than one question waits."""
    wait_until(lambda: _answers(net), "it answers")


def _answers(net: Network) -> bool:
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), directly.open(net.url("one"), timeout=_ASK_S) as answer:
        return bool(answer.status == 200)
    return False
