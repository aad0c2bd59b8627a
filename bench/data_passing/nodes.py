"""A scheduler, GPU managers and functions in processes of their own, in a folder for one bench."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch_shim
from bench.measure.report import MeasurementFailed
from gpu_manager.credentials import FunctionCredentials, FunctionIdentity, load_secret
from gpufaas.stack.held_ports import HeldPort

_START_S = 120.0
_ACTIVATE = Path(torch_shim.__file__).parent / "activate"
_ROOT = _ACTIVATE.parents[1]
TENANT = "bench"


class BenchFunction:
    """One function process, which carries out orders."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.hear()

    def ask(self, *order: Any) -> Any:
        """Give an order; what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementFailed(f"a function ended with {self._process.wait()}")
        return json.loads(line)


class BenchNodes:
    """A cluster of as many nodes as are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._url = f"127.0.0.1:{HeldPort().keep()}"
        self._secret = folder / "secret"
        self._running: list[subprocess.Popen[Any]] = []

    def scheduler(self) -> None:
        """Start the scheduler."""
        self._daemon("answers at", ["scheduler", "--listen", self._url])

    def node(self, name: str, *options: str) -> str:
        """Start a GPU manager with an emulated GPU; its address on this machine."""
        address = f"unix:{self.folder / name}.sock"
        command = ["gpu-manager", "--node", name, "--devices", "cpu:1", "--gpu-memory", "2GiB"]
        command += ["--listen", address, "--scheduler", f"http://{self._url}", *options]
        self._daemon("is attached", command)
        return address

    def secured(self) -> tuple[str, list[str]]:
        """An address under TLS, and the options of a node that listens there, too."""
        key, certificate = self.folder / "node.key", self.folder / "node.pem"
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        where = ["-subj", "/CN=node", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(["openssl", "req", "-x509", *curve, *where], check=True, capture_output=True)
        address = f"tls:127.0.0.1:{HeldPort().keep()}"
        options = ["--listen", address, "--certificate", str(certificate), "--key", str(key)]
        return address, options

    def function(self, name: str, address: str, scale: float, size_bytes: int) -> BenchFunction:
        """Start a function whose node's manager is at this address."""
        secret = load_secret(self._secret)
        credential = FunctionCredentials(secret).issue(FunctionIdentity(TENANT, name))
        command = [sys.executable, "-m", "bench.data_passing.function_program"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*command, str(scale), str(size_bytes)],
            env=function_environment(address, credential),
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        self._running.append(process)
        return BenchFunction(process)

    def stop(self) -> None:
        """End everything, the last started first."""
        for process in reversed(self._running):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def _daemon(self, ready: str, command: Sequence[str]) -> None:
        log = self.folder / f"{len(self._running)}.log"
        words = [sys.executable, "-m", "gpufaas", *command, "--secret-file", str(self._secret)]
        with log.open("wb") as out:
            self._running.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )
        deadline_s = time.monotonic() + _START_S
        while ready not in log.read_text(encoding="utf-8", errors="replace"):
            if self._running[-1].poll() is not None or time.monotonic() > deadline_s:
                raise MeasurementFailed(f"{command[0]} did not start: {log.read_text()[-500:]}")
            time.sleep(0.05)


def function_environment(address: str, credential: str) -> dict[str, str]:
    """The variables of a function whose node's manager is at this address."""
    return {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join([str(_ACTIVATE), str(_ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",  # a function has no GPU
        "GPUFAAS_ENABLED": "1",
        "GPUFAAS_ADDRESS": address,
        "GPUFAAS_CREDENTIAL": credential,
        "GPUFAAS_TRACING": "wait",
    }


@contextmanager
def bench_nodes() -> Iterator[BenchNodes]:
    """A cluster that is ended with the block."""
    with TemporaryDirectory(prefix="gpufaas-bench-") as folder:
        found = BenchNodes(Path(folder))
        try:
            found.scheduler()
            yield found
        finally:
            found.stop()
