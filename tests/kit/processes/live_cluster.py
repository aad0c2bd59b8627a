"""A whole cluster of real processes: etcd, two schedulers, three nodes; any of it can be broken."""

import json
import signal
import time
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gpu_manager.credentials import (
    ADMINISTRATOR,
    FunctionCredentials,
    FunctionIdentity,
    load_secret,
)
from gpufaas.remote.manager_api import request_admin
from gpufaas.stack.own_etcd import find_etcd
from scheduler.service.access import ApiRole, token
from scheduler.store.etcd_channel import EtcdSettings
from scheduler.store.etcd_store import prefix_end
from tests.kit.engines.real_etcd import LOG
from tests.kit.network.networks import HERE, NameSpaces, Network, NoNetwork
from tests.kit.network.relays import Relays
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.processes.daemons import GPUFAAS, START_S, Daemon
from tests.kit.processes.journals import Journal
from tests.kit.waiting import wait_until
from tests.kit.worlds.waiting_caller import WaitingCaller

ETCD = "etcd"
SCHEDULERS = ("s0", "s1")
NODES = ("n0", "n1", "n2")
FUNCTION = FunctionIdentity("team", "reader")
SECRET = b"a secret of the cluster in the tests"

_GPU_MEMORY = "2GiB"
_RUN_S = 0.01
_ASK_S = 2.0
_ROOT = EtcdSettings().prefix
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LiveCluster:
    """One etcd, schedulers and nodes, each on a host of its own, and who asks them."""

    def __init__(
        self,
        folder: Path,
        net: Network,
        brought: list[SealedWeights],
        node_options: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> None:
        """Every node is brought these weights; more may follow. The caller closes them all.

        `node_options` are further ones of the GPU manager of that name; they outdo ours.
        """
        self.folder = folder
        self.net = net
        self.secret_file = folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_bytes(SECRET)
        self._node_options = node_options
        self._credentials = FunctionCredentials(load_secret(self.secret_file))
        self.etcd = Daemon(self._etcd(), folder / "etcd.log", "")
        self.schedulers = {name: self._scheduler(name) for name in SCHEDULERS}
        self.nodes = {name: self._node(name) for name in NODES}
        self._brought = brought

    @property
    def urls(self) -> list[str]:
        """Where the schedulers answer."""
        return [self.net.url(name) for name in SCHEDULERS]

    # -- bringing it up, and up again -------------------------------------------------------------

    def whole(self) -> float:
        """Heal and start what is missing until one scheduler leads all nodes; the seconds."""
        began_s = time.monotonic()
        self.net.heal()
        daemons = {ETCD: self.etcd, **self.schedulers, **self.nodes}
        started = [daemon for daemon in daemons.values() if not daemon.running]
        for daemon in started:
            daemon.start()
        for daemon in started:
            daemon.answers()
        wait_until(lambda: self.shown(self.leader()).get("gpus") == len(NODES), "all nodes are led")
        for image in self._brought:
            self._upload(image)
        return time.monotonic() - began_s

    def bring(self, image: SealedWeights) -> None:
        """Let every node have these weights, now and after a restart."""
        self._brought.append(image)
        self._upload(image)

    def end(self) -> None:
        """Kill all that runs."""
        for daemon in (*self.nodes.values(), *self.schedulers.values(), self.etcd):
            daemon.kill()

    # -- who leads, and what is shown -------------------------------------------------------------

    def leaders(self) -> dict[str, int]:
        """Which schedulers say that they lead, and in which terms."""
        shown = {name: self.shown(name) for name in SCHEDULERS}
        return {name: found["term"] for name, found in shown.items() if found.get("leading")}

    def leader(self) -> str:
        """Who leads, once exactly one does, with the datastore's word for it."""

        found: list[str] = []  # a scheduler that is asked again may take too long to answer

        def one() -> bool:
            found[:] = self.leaders()
            return len(found) == 1 and self.shown(found[0]).get("confirmed", False)

        wait_until(one, "one leads", instead=lambda: str(self.leaders()))
        return found[0]

    def other(self, than: str) -> str:
        """The other scheduler."""
        return next(name for name in SCHEDULERS if name != than)

    def shown(self, scheduler: str, path: str = "/readyz") -> Mapping[str, Any]:
        """What a scheduler shows; nothing where it does not answer."""
        bearer = {"authorization": f"Bearer {token(SECRET, ApiRole.ADMIN)}"}
        request = urllib.request.Request(self.net.url(scheduler) + path, headers=bearer)
        try:
            with _DIRECTLY.open(request, timeout=_ASK_S) as answer:
                found: Mapping[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return {}

    def residents(self, node: str) -> set[str]:
        """What is on a node's GPUs, as its manager says."""
        rows = request_admin(
            self.address(node), self._credentials.issue(ADMINISTRATOR), do="models"
        )["models"]
        return {row["model"] for row in rows if row["gpu"] is not None}

    def journal(self) -> Journal:
        """The leases of every node from the beginning on."""
        return Journal.of(life for node in self.nodes.values() for life in node.lives())

    # -- who asks ---------------------------------------------------------------------------------

    def client(self, *, first: str = SCHEDULERS[0]) -> WaitingCaller:
        """A client that knows every scheduler, and asks this one first."""
        urls = [self.net.url(name) for name in (first, self.other(first))]
        return WaitingCaller(urls, token(SECRET, ApiRole.CALLER))

    def function(self, node: str) -> FunctionClient:
        """A function's connection to a node."""
        return FunctionClient(self.address(node), self._credentials.issue(FUNCTION))

    # etcd is asked over HTTP by this thread. gRPC would start threads that stay in the network name
    # space of this cluster, and later tests of the same process share them.

    def stored(self, prefix: str) -> dict[str, Any]:
        """The keys of etcd that begin so, with their JSON values."""
        first = f"{_ROOT}{prefix}".encode()
        asked = {"key": _coded(first), "range_end": _coded(prefix_end(first))}
        rows = self._ask_etcd("range", asked).get("kvs", ())
        found = {b64decode(row["key"]).decode(): b64decode(row["value"]) for row in rows}
        return {key.removeprefix(_ROOT): json.loads(value) for key, value in found.items()}

    def put_stored(self, key: str, value: bytes) -> None:
        """Write one key of etcd."""
        asked = {"key": _coded(f"{_ROOT}{key}".encode()), "value": _coded(value)}
        self._ask_etcd("put", asked)

    def command(self, *words: str, first: str) -> list[str]:
        """A command that asks the schedulers, this one first."""
        urls = ",".join(self.net.url(name) for name in (first, self.other(first)))
        return [*words, "--scheduler", urls, "--secret-file", str(self.secret_file)]

    def address(self, node: str) -> str:
        """Where a node's manager listens; files cross the borders of name spaces."""
        return f"unix:{self.folder / node}.sock"

    # -- inside -----------------------------------------------------------------------------------

    def _ask_etcd(self, what: str, asked: Mapping[str, str]) -> dict[str, Any]:
        url, body = f"{self.net.url(ETCD)}/v3/kv/{what}", json.dumps(asked).encode()
        with _DIRECTLY.open(urllib.request.Request(url, body), timeout=START_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def _upload(self, image: SealedWeights) -> None:
        for node in NODES:
            with closing(self.function(node)) as function:
                function.upload(image)

    def _etcd(self) -> list[str]:
        program = find_etcd()
        assert program is not None
        url, peers = f"http://{self.net.listens_at(ETCD)}", "http://127.0.0.1:0"
        return self.net.command(
            ETCD,
            str(program.path),
            *(f"--data-dir={self.folder / 'etcd'}", "--log-level=warn"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"),
            *(f"--initial-cluster=default={peers}", "--unsafe-no-fsync"),
            *("--heartbeat-interval=50", "--election-timeout=250"),
        )

    def _scheduler(self, name: str) -> Daemon:
        command = [*GPUFAAS, "scheduler", "--name", name, "--listen", self.net.listens_at(name)]
        command += ["--advertise", self.net.url(name), "--etcd", self.net.url(ETCD, name)]
        command += ["--secret-file", str(self.secret_file)]
        command = self.net.command(name, *command)
        return Daemon(command, self.folder / f"{name}.log", " answers at ")

    def _node(self, name: str) -> Daemon:
        schedulers = ",".join(self.net.url(each, name) for each in SCHEDULERS)
        command = [*GPUFAAS, "gpu-manager", "--node", name, "--listen", self.address(name)]
        command += ["--devices", "cpu:1", "--gpu-memory", _GPU_MEMORY, "--store-memory", "64MiB"]
        command += ["--emulate-run", str(_RUN_S), "--scheduler", schedulers]
        command += ["--secret-file", str(self.secret_file), "--log-level", "debug"]
        command = self.net.command(name, *command, *self._node_options(name))
        return Daemon(command, self.folder / f"{name}.log", " is attached")


@contextmanager
def live_cluster(
    folder: Path, brought: list[SealedWeights], *, alone: bool = False
) -> Iterator[LiveCluster]:
    """A cluster of which every process is gone at the end; not started yet.

    Its hosts are name spaces, if they can be made and the processes are not to be `alone`.
    """
    net = _network(alone=alone)
    try:
        found = LiveCluster(folder, net, brought)
        try:
            yield found
        finally:
            found.end()
    finally:
        net.end()


def _network(*, alone: bool) -> Network:
    hosts = (ETCD, *SCHEDULERS, *NODES)
    net: Network = NameSpaces(hosts)
    try:
        if alone:
            raise NoNetwork("nobody wants them")
        net.make()
    except NoNetwork as error:
        LOG.warning("no network name spaces, relays on loopback instead: %s", error)
        net = Relays(hosts, _sender)
        net.make()
    return net


def _sender(host: str, said: bytes) -> str:
    """Who asks a scheduler: a node for its stream, or another scheduler, if it may lead."""
    line, _, headers = said.partition(b"\r\n")
    for node in NODES:
        if f"/nodes/{node}/".encode() in line:
            return node
    if b" /readyz " in line and b"authorization" not in headers.lower():
        return next(name for name in SCHEDULERS if name != host)
    return HERE


def freeze(daemon: Daemon) -> None:
    """Stop it without ending it: connections stay, answers do not come."""
    daemon.tell(signal.SIGSTOP)


def thaw(daemon: Daemon) -> None:
    """Let it go on."""
    daemon.tell(signal.SIGCONT)


def _coded(text: bytes) -> str:
    """Bytes as etcd's JSON has them."""
    return b64encode(text).decode()
