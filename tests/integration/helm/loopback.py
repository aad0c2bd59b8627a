"""Runs what the chart renders as processes on loopback.

Hosts, folders and ports are others than in a cluster; command lines, settings, secrets and probes
are the same.
"""

import http.client
import re
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from gpufaas.stack.held_ports import HeldPort
from tests.kit.engines.kubernetes.helm import Document, Pod, Rendered
from tests.kit.processes.daemons import GPUFAAS, START_S, Daemon
from tests.kit.waiting import wait_until

_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*\.svc\.cluster\.local|0\.0\.0\.0|localhost")
_FOLDERS = re.compile(r"(?<![\w.])/(etc/gpufaas|etc/etcd|etc/nats|var/lib|run/gpufaas|data)\b")
_PORT = re.compile(r"(?<=:)( ?)(2379|2380|2381|4222|7700|7701|7801|8080|8081|8222)\b")

VARIABLES = {"NODE_NAME": "n1", "POD_IP": "127.0.0.1"}


class Loopback:
    """One pod of each part; `theirs` are secrets that the chart takes for granted.

    Settings named in `unknown` are left out, as those that a program here is too old for.
    """

    def __init__(
        self,
        rendered: Rendered,
        folder: Path,
        theirs: Mapping[str, Mapping[str, str]],
        ports: Mapping[str, int],
        unknown: Collection[str] = (),
    ) -> None:
        self._rendered = rendered
        self._folder = folder
        self._theirs = theirs
        self._ports = dict(ports)
        self._unknown = tuple(unknown)

    def port(self, number: int | str) -> int:
        """Where that port of the cluster is here."""
        return self._ports.setdefault(str(number), HeldPort().keep())

    def here(self, component: str, text: str) -> str:
        """A text about the cluster, about this machine."""
        kept = (line for line in text.split("\n") if not line.strip().startswith(self._unknown))
        text = _HOST.sub("127.0.0.1", "\n".join(kept))
        text = _PORT.sub(lambda found: f"{found[1]}{self.port(found[2])}", text)
        return _FOLDERS.sub(lambda found: f"{self._folder / component}{found[0]}", text)

    def daemon(self, component: str, program: Path | None = None) -> Daemon:
        """A part as a process, with its files where it looks for them; not yet started."""
        command = self.command(component, program)
        return Daemon(command, self._folder / f"{component}.log", "")

    def command(self, component: str, program: Path | None = None) -> list[str]:
        """A part's command line, with its files where it looks for them."""
        pod = self._rendered.pod(component)
        self._lay_out(pod)
        name = f"{pod.owner['metadata']['name']}-0"
        words = pod.arguments(POD_NAME=name, **VARIABLES)
        begun = GPUFAAS if program is None else (str(program),)
        return [*begun, *(self.here(component, word) for word in words)]

    def is_ready(self, component: str, daemon: Daemon) -> None:
        """Wait until the readiness probe succeeds."""
        pod = self._rendered.pod(component)
        probe = pod.container["readinessProbe"]["httpGet"]
        port = self.port(pod.ports[probe["port"]])
        said: list[str] = []

        def is_ready() -> bool:
            said[:] = [_status(port, probe["path"]), daemon.said()[-3000:]]
            assert daemon.running, f"{component} ended: {said}"
            return said[0] == "200"

        wait_until(is_ready, f"{component} is ready", within_s=START_S, instead=lambda: str(said))
        alive = pod.container["livenessProbe"]["httpGet"]
        alive_at = self.port(pod.ports[alive["port"]])
        wait_until(lambda: _status(alive_at, alive["path"]) == "200", f"{component} is alive")

    def path(self, component: str, path: str) -> Path:
        """A file or folder of a part."""
        return Path(self.here(component, path))

    def _lay_out(self, pod: Pod) -> None:
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        for mount in pod.container["volumeMounts"]:
            folder = self.path(pod.component, mount["mountPath"])
            if folder == Path("/tmp"):
                continue
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, content in self._files(pod, volumes.get(mount["name"], {})):
                file = folder / name
                file.touch(mode=0o600)
                file.write_text(content)

    def _files(self, pod: Pod, volume: Document) -> Iterator[tuple[str, str]]:
        for source in volume.get("projected", {}).get("sources", [volume]):
            if "configMap" in source:
                texts = self._rendered.one("ConfigMap", source["configMap"]["name"])["data"]
                for item in source["configMap"]["items"]:
                    yield item["path"], self.here(pod.component, texts[item["key"]])
            elif "secret" in source:
                name = source["secret"].get("secretName") or source["secret"]["name"]
                for item in source["secret"]["items"]:
                    yield item["path"], self._secret(pod, name, item["key"])

    def _secret(self, pod: Pod, name: str, key: str) -> str:
        if name in self._theirs:
            return self._theirs[name][key]
        found = self._rendered.one("Secret", name)
        if key in found.get("stringData", {}):
            return self.here(pod.component, found["stringData"][key])
        return b64decode(found["data"][key]).decode()


def _status(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    finally:
        connection.close()
