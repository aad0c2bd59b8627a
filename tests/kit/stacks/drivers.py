"""What people do with functions, by plain REST and by faas-cli; Refused where it is not done."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.places import ROOT
from tests.kit.stacks.stack import PATIENCE_S, Rest, Stack

LANGUAGE = "python3-torch-gpu"
_DEFAULT = "openfaas-fn"
_GOOD = range(200, 300)


class Refused(Exception):
    """The gateway did not do it; the text is what a person reads."""


@dataclass(frozen=True)
class Wanted:
    """A function as somebody asks for it."""

    name: str
    image: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    namespace: str = ""


class RestDriver:
    """The routes of OpenFaaS."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._rest = Rest(stack)

    def login(self, password: str) -> None:
        self._rest = Rest(self._stack, password=password)
        self._ask("GET", "/system/functions")

    def new(self, name: str) -> Path:
        """The folder with the handler that the template proposes."""
        shutil.copytree(ROOT / "template" / LANGUAGE / "function", self._folder / name)
        return self._folder / name

    def build(self, name: str) -> None:
        target = self._stack.work / "build" / name / "function"
        shutil.copytree(self._folder / name, target, dirs_exist_ok=True)

    def up(self, name: str) -> None:
        """Build and deploy what `new` made."""
        self.build(name)
        said = {"service": name, "image": f"{name}:latest", "envProcess": "python runtime --gpu"}
        self._ask("POST", "/system/functions", said)

    def deploy(self, wanted: Wanted) -> None:
        said = {
            "service": wanted.name,
            "image": wanted.image,
            "annotations": dict(wanted.annotations),
            "envVars": dict(wanted.environment),
            "secrets": list(wanted.secrets),
            "namespace": wanted.namespace,
        }
        try:
            self._ask("PUT", "/system/functions", said)
        except Refused:
            self._ask("POST", "/system/functions", said)

    def listed(self, namespace: str = "") -> Mapping[str, int]:
        """Functions and their replicas."""
        said = json.loads(self._ask("GET", f"/system/functions?namespace={namespace}"))
        return {each["name"]: each["replicas"] for each in said}

    def describe(self, name: str) -> str:
        return self._ask("GET", f"/system/function/{name}")

    def invoke(self, name: str, body: str, namespace: str = "") -> str:
        answer = self._rest.call(f"{name}.{namespace or _DEFAULT}", body)
        return _text(answer.status_code, answer.text)

    def invoke_later(self, name: str, body: str, callback: str) -> None:
        answer = self._rest.http.post(
            f"/async-function/{name}", content=body, headers={"X-Callback-Url": callback}
        )
        _text(answer.status_code, answer.text)

    def logs(self, name: str, count: int) -> list[str]:
        """The last lines, as many as were asked for at most."""
        said = self._ask("GET", f"/system/logs?name={name}&tail={count}")
        return [json.loads(line)["text"] for line in said.splitlines()]

    def create_secret(self, name: str, value: str) -> None:
        self._ask("POST", "/system/secrets", {"name": name, "value": value})

    def update_secret(self, name: str, value: str) -> None:
        self._ask("PUT", "/system/secrets", {"name": name, "value": value})

    def remove_secret(self, name: str) -> None:
        self._ask("DELETE", "/system/secrets", {"name": name})

    def secrets(self) -> list[str]:
        return [each["name"] for each in json.loads(self._ask("GET", "/system/secrets"))]

    def namespaces(self) -> list[str]:
        return list(json.loads(self._ask("GET", "/system/namespaces")))

    def remove(self, name: str, namespace: str = "") -> None:
        self._ask("DELETE", "/system/functions", {"functionName": name, "namespace": namespace})

    def version(self) -> str:
        return self._ask("GET", "/system/info")

    def _ask(self, method: str, path: str, said: object = None) -> str:
        answer = self._rest.ask(method, path, said)
        return _text(answer.status_code, answer.text)


class CliDriver:
    """faas-cli, with a login of its own."""

    def __init__(self, stack: Stack, folder: Path, program: Path, path: str) -> None:
        self._stack = stack
        self._folder = folder
        self._program = program
        self._environment = {"PATH": path, "HOME": str(folder), "OPENFAAS_CONFIG": str(folder)}
        # It reads templates, and writes builds, where it runs.
        (folder / "template").symlink_to(ROOT / "template")
        (folder / "build").symlink_to(stack.work / "build")
        (stack.work / "build").mkdir(exist_ok=True)
        self.login(stack.password)

    def login(self, password: str) -> None:
        self._run("login", "--password-stdin", stdin=password)

    def new(self, name: str) -> Path:
        self._run("new", name, "--lang", LANGUAGE, "--quiet")
        written = self._folder / "stack.yaml"
        if written.exists():  # older ones name it after the function; `deploy --name` reads this
            written.rename(self._folder / f"{name}.yml")
        return self._folder / name

    def build(self, name: str) -> None:
        self._run("build", "--shrinkwrap", "-f", f"{name}.yml", gateway=False)

    def up(self, name: str) -> None:
        self._run("up", "--shrinkwrap", "--skip-push", "-f", f"{name}.yml")

    def deploy(self, wanted: Wanted) -> None:
        options = [
            *(f"--annotation={key}={value}" for key, value in wanted.annotations.items()),
            *(f"--env={key}={value}" for key, value in wanted.environment.items()),
            *(f"--secret={name}" for name in wanted.secrets),
            *_of(wanted.namespace),
        ]
        self._run("deploy", "--name", wanted.name, "--image", wanted.image, *options)

    def listed(self, namespace: str = "") -> Mapping[str, int]:
        rows = [line.split() for line in self._run("list", *_of(namespace)).splitlines()[1:]]
        return {row[0]: int(row[2]) for row in rows if row}

    def describe(self, name: str) -> str:
        return self._run("describe", name)

    def invoke(self, name: str, body: str, namespace: str = "") -> str:
        return self._run("invoke", name, *_of(namespace), stdin=body)

    def invoke_later(self, name: str, body: str, callback: str) -> None:
        between = ": " if "KEY: VALUE" in self._run("invoke", "--help") else "="
        header = f"X-Callback-Url{between}{callback}"
        self._run("invoke", name, "--async", "--header", header, stdin=body)

    def logs(self, name: str, count: int) -> list[str]:
        lines = self._run("logs", name, "--tail=false", f"--lines={count}").splitlines()
        return [line.partition(" ")[2] for line in lines]

    def create_secret(self, name: str, value: str) -> None:
        self._run("secret", "create", name, "--from-literal", value)

    def update_secret(self, name: str, value: str) -> None:
        self._run("secret", "update", name, "--from-literal", value)

    def remove_secret(self, name: str) -> None:
        self._run("secret", "remove", name)

    def secrets(self) -> list[str]:
        lines = self._run("secret", "list").split()
        return lines[lines.index("NAME") + 1 :] if "NAME" in lines else []

    def namespaces(self) -> list[str]:
        lines = self._run("namespaces").splitlines()
        return [line.strip(" -") for line in lines if line.startswith(" - ")]

    def remove(self, name: str, namespace: str = "") -> None:
        self._run("remove", name, *_of(namespace))

    def version(self) -> str:
        return self._run("version", "--warn-update=false")

    def _run(self, *words: str, stdin: str = "", gateway: bool = True) -> str:
        where = (f"--gateway={self._stack.url}",) if gateway else ()
        done = subprocess.run(
            [str(self._program), *words, *where],
            cwd=self._folder,
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise Refused(done.stdout + done.stderr)
        return done.stdout


def _of(namespace: str) -> tuple[str, ...]:
    return ("--namespace", namespace) if namespace else ()


def _text(status: int, said: str) -> str:
    if status not in _GOOD:
        raise Refused(f"{status}: {said}")
    return said
