"""What a person can choose about a gateway: one frozen value, built at the entry point."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway; its keys are those of `gpufaas.toml`, table `[gateway]`.

    `role` is what `/system/info` answers: `gateway` to faas-cli, or `provider` behind the gateway
    of OpenFaaS. `provider` is who runs functions: `process` or `upstream`. `secrets_dir` holds
    `basic-auth-user` and `basic-auth-password`, as OpenFaaS mounts them; empty is the folder
    `secrets` in `state_dir`, where they are made when they are missing. Without a `state_dir` the
    command line chooses one. What a body may have,
    `max_body_bytes`, is far above what a browser or a queue sends; bodies are streamed, never held.
    """

    listen: str = "127.0.0.1:8080"
    role: str = "gateway"
    provider: str = "process"
    auth: bool = True
    secrets_dir: str = ""
    state_dir: str = ""
    log_level: str = "info"
    log_json: bool = False
    release: str = ""
    sha: str = ""

    # Calls: what one may have, and how long is waited for the function, for one that is to start,
    # and for a connection. A function's own wish goes before `timeout_s`.
    max_body_bytes: int = 512 << 20
    timeout_s: float = 60.0
    wake_s: float = 60.0
    connect_s: float = 2.0
    drain_s: float = 30.0
    max_replicas: int = 1_000

    # Jobs: calls through /async-function.
    async_concurrency: int = 16
    async_attempts: int = 10
    async_max_body_bytes: int = 64 << 20
    callback_private: bool = True

    # Scaling: how often it is looked at.
    scaling: bool = True
    scale_every_s: float = 1.0

    # The process provider: where builds are, folders that a deployment may name, whose Python, and
    # what functions must reach although a folder above is closed to their users.
    builds_dir: str = "build"
    roots: tuple[str, ...] = (".",)
    base_python: str = ""
    visible: tuple[str, ...] = ()

    # An upstream provider: any that speaks faas-provider, over plain HTTP. Labels and annotations
    # that begin so are kept here and not told to it.
    upstream_url: str = ""
    upstream_user: str = ""
    upstream_password_file: str = ""
    upstream_poll_s: float = 5.0
    upstream_timeout_s: float = 30.0
    upstream_strip: tuple[str, ...] = ("com.gpufaas.", "com.openfaas.scale.")
