"""The cluster of processes with a gateway and its functions, every host in a network of its own."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import SchedulerApi
from hunt.campaign.campaign_functions import deploy
from hunt.campaign.judging.leftovers import Holdings
from hunt.campaign.worlds.books import NodeMetrics, answers, books, leases, waiting
from hunt.campaign.worlds.new_text import NewText
from hunt.campaign.worlds.process_holdings import (
    marked,
    memfds,
    part_holdings,
    roles,
    strays,
    zombies,
)
from hunt.campaign.worlds.shifted_clock import ShiftedClock
from scheduler.service.access import ApiRole, token
from tests.kit.network.networks import HERE, NameSpaces
from tests.kit.places import ROOT
from tests.kit.processes.daemons import GPUFAAS, Daemon
from tests.kit.processes.journals import Journal, unended
from tests.kit.processes.live_cluster import ETCD, NODES, SCHEDULERS, SECRET, LiveCluster
from tests.kit.waiting import wait_until

GATEWAY = "gateway"
HOSTS = (ETCD, *SCHEDULERS, *NODES, GATEWAY)
_NODE_PORT, _METRICS_PORT = 7701, 7702


class ClockedHosts(NameSpaces):
    """Network name spaces, each of which has a clock of its own too."""

    def __init__(self, hosts: Sequence[str], folder: Path) -> None:
        super().__init__(hosts)
        self.clocks = {host: ShiftedClock(folder / f"{host}.clock") for host in hosts}
        self._mark = f"CAMPAIGN_WORLD={folder}/"

    def command(self, host: str, *command: str) -> list[str]:
        """What runs a command on that host, under its clock."""
        more = [f"{key}={value}" for key, value in self.clocks[host].environment.items()]
        return super().command(host, "env", self._mark, *more, *command)


class ClusterWorld:
    """etcd, two schedulers, three nodes and a gateway; functions reach every node over TCP."""

    name = "cluster"

    def __init__(self, folder: Path, net: ClockedHosts) -> None:
        self.folder = folder
        self.net = net
        self.work = folder / "work"
        self.work.mkdir()
        self.cluster = LiveCluster(folder, net, [], self._node_options)
        self.gateway = Daemon(self._gateway(), folder / "gateway.log", "documentation at")
        self._read = NewText()
        self._judged_bytes: dict[str, int] = {}  # of each node's log
        self._went_on: dict[str, str] = {}

    @property
    def url(self) -> str:
        """Where its gateway answers."""
        return self.net.url(GATEWAY)

    @property
    def host(self) -> str:
        """The address at which its gateway reaches us."""
        return self.net.address(HERE)

    @property
    def password(self) -> str:
        """Of the gateway's administrator."""
        return (self.folder / "gateway" / "secrets" / "basic-auth-password").read_text().strip()

    @property
    def scheduler(self) -> SchedulerApi:
        """Whichever of the schedulers leads."""
        return SchedulerApi(self.cluster.urls, token(SECRET, ApiRole.ADMIN))

    @property
    def daemons(self) -> Mapping[str, Daemon]:
        """Every process that the campaign has started itself."""
        it = self.cluster
        return {ETCD: it.etcd, **it.schedulers, **it.nodes, GATEWAY: self.gateway}

    def start(self) -> None:
        """Have it up, with its functions."""
        self.restore()
        deploy(self, self.work)

    def end(self) -> None:
        """Whatever happened, nothing of it stays."""
        self.gateway.kill()
        self.cluster.end()

    def inside(self) -> AbstractContextManager[None]:
        """Have this thread, and those that it starts, on the cluster's network."""
        return self.net.inside()

    def restore(self) -> None:
        """Heal the network, start again what has ended, and wait until all of it is whole."""
        self.cluster.whole()
        if not self.gateway.running:
            self.gateway.start()
            self.gateway.answers()
        wait_until(self._is_whole, "every node is led")

    def holdings(self) -> Holdings:
        """What it holds now; CommandError or OSError where a part does not answer."""
        found = self.scheduler.get("/cluster")
        nodes = [NodeMetrics(f"http://{self.net.address(node)}:{_METRICS_PORT}") for node in NODES]
        processes = self.processes()
        roots = {name: daemon.pid for name, daemon in self.daemons.items() if daemon.running}
        found_books = books(found, nodes)
        return Holdings(
            parts={name: part_holdings(pid) for name, pid in roots.items()},
            processes=roles(processes),
            strays=strays(processes, roots.values()),
            zombies=zombies(processes),
            memfds=memfds(processes),
            models=sum(one.hosted for one in found_books.values()),
            leases=leases(found),
            waiting=waiting(found),
            node_leases=sum(node.leases() for node in nodes),
            books=found_books,
        )

    def processes(self) -> Mapping[int, str]:
        """Every process of it, with its command."""
        return marked([f"{self.folder}/".encode()])

    def logs(self) -> Sequence[Path]:
        """What its parts have written."""
        return [daemon.log for daemon in self.daemons.values()]

    def wrong(self) -> list[str]:
        """Slots that two leases had at a time, and exceptions that nobody expected."""
        lives = [life for name in NODES for life in self._new_lives(name)]
        found = [f"a node's journal: {wrong}" for wrong in Journal.of(lives).wrong]
        return found + self._read.tracebacks(self.logs())

    def _new_lives(self, node: str) -> list[str]:
        """What a node's log says since the last look, with its leases that went on then."""
        daemon, begin = self.cluster.nodes[node], self._judged_bytes.get(node, 0)
        end = daemon.log.stat().st_size
        found = daemon.lives(begin, end)
        found[0] = self._went_on.get(node, "") + found[0]
        self._judged_bytes[node], self._went_on[node] = end, unended(found[-1])
        return found

    def _is_whole(self) -> bool:
        with suppress(CommandError, OSError):
            gpus = self.scheduler.get("/cluster")["gpus"]
            led = len(gpus) == len(NODES) and not any(gpu["silent"] for gpu in gpus)
            return led and answers(f"{self.url}/readyz")
        return False

    def _node_options(self, node: str) -> Sequence[str]:
        at = self.net.address(node)
        return (
            *("--listen", f"tcp:{at}:{_NODE_PORT}", "--advertise", f"tcp:{at}:{_NODE_PORT}"),
            *("--metrics", f"{at}:{_METRICS_PORT}", "--store-memory", "256MiB"),
        )

    def _gateway(self) -> list[str]:
        settings = self.folder / "gpufaas.toml"
        settings.write_text(
            f'[gateway]\nroots = ["{self.work}", "{ROOT}"]\n'
            f'callback_allowed = ["{self.host}"]\nbuilds_dir = "{self.work / "build"}"\n'
        )
        command = [*GPUFAAS, "gateway", "--config", str(settings)]
        command += ["--listen", self.net.listens_at(GATEWAY), "--secret-file"]
        command += [str(self.cluster.secret_file), "--state-dir", str(self.folder / "gateway")]
        command += ["--scheduler", ",".join(self.net.url(each, GATEWAY) for each in SCHEDULERS)]
        command += ["--node", f"tcp:{self.net.address(NODES[0])}:{_NODE_PORT}"]
        return self.net.command(GATEWAY, *command)


@contextmanager
def cluster_world(environment: Mapping[str, str]) -> Iterator[ClusterWorld]:
    """One that is up; NoNetwork where name spaces cannot be made."""
    del environment  # its processes have this one's
    folder = Path(tempfile.mkdtemp(prefix="camp"))
    folder.chmod(0o755)
    with contextlib.ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        net = ClockedHosts(HOSTS, folder)
        net.make()
        ends.callback(net.end)
        found = ClusterWorld(folder, net)
        ends.callback(found.end)
        with found.inside():
            found.start()
        yield found
