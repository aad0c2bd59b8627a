"""`gpufaas workflow check|list|get|deploy|invoke|remove|logs`: workflows of a gateway."""

import argparse
import http.client
import json
import re
import sys
from pathlib import Path
from urllib.parse import quote

from gateway_ext.workflows.errors import BadWorkflowFile
from gateway_ext.workflows.plan import read_workflow
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, add_verb, print_answer
from gpufaas.output.workflow_text import plan_text, runs_text, workflow_rows, workflow_text
from gpufaas.remote.gateway_api import add_gateway_options, gateway_api

_ALL, _ONE = "/system/workflows", "/system/workflow"
_LONGEST_SILENCE_S = 3600.0
_PIECE_BYTES = 64 << 10
_FAILURES, _EXIT_FAILED = 400, 1
_PROBLEM = re.compile(r"^line (\d+): ", re.MULTILINE)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("workflow", help="deploy and call graphs of functions")
    _add_options(parser, "")
    parser.set_defaults(namespace="", run=_list)
    verbs = parser.add_subparsers(dest="verb")
    check = add_verb(verbs, "check", "check a workflow.yml, and show its stages; deploy nothing")
    deploy = add_verb(verbs, "deploy", "check a workflow.yml and deploy it, or replace one")
    check.set_defaults(run=_check)
    for verb in (check, deploy):
        verb.add_argument("file", nargs="?", default="workflow.yml", help="(workflow.yml)")
    every = add_verb(verbs, "list", "all workflows of a namespace")
    get = add_verb(verbs, "get", "a workflow's stages, and their share of the time")
    invoke = add_verb(verbs, "invoke", "call a workflow, and print its answer as it arrives")
    remove = add_verb(verbs, "remove", "remove a workflow")
    logs = add_verb(verbs, "logs", "the last runs of a workflow, with their stages")
    for verb in (get, invoke, remove, logs):
        verb.add_argument("name")
    add, later = invoke.add_argument, "queue the call, and print its id"
    add("--body", default=None, metavar="FILE|TEXT", help="@FILE, @- or the text itself")
    add("--content-type", default=None, metavar="TYPE", help="(by the body)")
    add("--async", dest="later", action="store_true", default=False, help=later)
    add("--callback", default=None, metavar="URL", help="with --async: for its result")
    for verb, run in (
        (deploy, _deploy), (every, _list), (get, _get),
        (invoke, _invoke), (remove, _remove), (logs, _logs),
    ):  # fmt: skip
        _add_options(verb, argparse.SUPPRESS)
        verb.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser, namespace: str) -> None:
    add_gateway_options(parser)
    parser.add_argument("--namespace", "-n", default=namespace, help="(openfaas-fn)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _check(options: argparse.Namespace) -> int:
    """The file alone: which functions are deployed, and how fast they are, only a gateway knows."""
    try:
        plan = read_workflow(_content(options.file, options.file).decode())
    except UnicodeDecodeError as error:
        raise CommandError(f"{options.file}: {error}") from error
    except BadWorkflowFile as error:
        raise CommandError(_in_file(options.file, str(error))) from error
    print("\n".join(plan_text(plan)))
    return 0


def _in_file(file: str, problems: str) -> str:
    return _PROBLEM.sub(lambda match: f"{file}:{match[1]}: ", problems)


def _deploy(options: argparse.Namespace) -> int:
    text = _content(options.file, options.file)
    gateway = gateway_api(options)
    with gateway.call("POST", _ALL, text) as response:
        status, said = response.status, response.read().decode("utf-8", "replace")
    if status == http.client.BAD_REQUEST:
        raise CommandError(_in_file(options.file, said))
    if status != http.client.ACCEPTED:
        gateway.refuse(status, said.encode())
    try:
        workflow = read_workflow(text.decode()).id
    except BadWorkflowFile:  # by the rules of a newer gateway it is one
        print(f"deployed {options.file}")
        return 0
    print(f"deployed {workflow}; call it: gpufaas workflow invoke {workflow} --body @FILE")
    print(f"or:  curl --data-binary @FILE {gateway.url}/workflow/{workflow}")
    return 0


def _list(options: argparse.Namespace) -> int:
    return print_answer(gateway_api(options).get(_path(_ALL, options)), options, workflow_rows)


def _get(options: argparse.Namespace) -> int:
    answer = gateway_api(options).get(_path(f"{_ONE}/{quote(options.name, safe='')}", options))
    return print_answer(answer, options, workflow_text)


def _remove(options: argparse.Namespace) -> int:
    wanted = {"workflowName": options.name, "namespace": options.namespace}
    gateway_api(options).order("DELETE", _ALL, json.dumps(wanted).encode())
    print(f"removed {options.name}")
    return 0


def _logs(options: argparse.Namespace) -> int:
    path = f"{_ONE}/{quote(options.name, safe='')}/runs"
    answer = gateway_api(options).get(_path(path, options))
    return print_answer(answer, options, lambda _: "\n".join(runs_text(answer["runs"])))


def _invoke(options: argparse.Namespace) -> int:
    gateway = gateway_api(options)
    body = _body(options.body)
    kind = options.content_type or _kind(body)
    headers = {"Content-Type": kind} if body else {}
    if options.callback:
        headers["X-Callback-Url"] = options.callback
    name = f"{options.name}.{options.namespace}" if options.namespace else options.name
    path = f"/{'async-' if options.later else ''}workflow/{quote(name, safe='')}"
    with gateway.call(
        "POST", path, body, headers=headers, longest_silence_s=_LONGEST_SILENCE_S
    ) as response:
        status = response.status
        if options.later and status == http.client.ACCEPTED:
            print(response.headers["X-Call-Id"])
        end = b"\n"
        while piece := response.read1(_PIECE_BYTES):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            end = piece[-1:]
        if end != b"\n" and sys.stdout.isatty():
            print(flush=True)
        if status < _FAILURES:
            return 0
        stage = response.headers.get("X-Workflow-Stage")
    where = f", from the stage {stage}" if stage else ""
    print(f"{options.name} answered {status}{where}", file=sys.stderr)
    return _EXIT_FAILED


def _path(path: str, options: argparse.Namespace) -> str:
    return f"{path}?namespace={quote(options.namespace)}" if options.namespace else path


def _body(option: str | None) -> bytes:
    if option is None:
        return b""
    if not option.startswith("@"):
        return option.encode()
    if option == "@-":
        return sys.stdin.buffer.read()
    return _content(option[1:], f"--body {option}")


def _content(path: str, shown: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"{shown}: {error.strerror}") from error


def _kind(body: bytes) -> str:
    try:
        json.loads(body)
    except ValueError:
        return "application/octet-stream"
    return "application/json"
