"""The settings of a gateway: one frozen value, built at the entry point."""

from dataclasses import dataclass

from gateway_ext.sites import is_loopback


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The table `[gateway]` of `gpufaas.toml`."""

    listen: str = "127.0.0.1:8080"
    role: str = "gateway"  # to faas-cli; `provider`: behind the gateway of OpenFaaS
    provider: str = "process"  # what runs functions; or `docker`, `kubernetes`, `upstream`
    auth: bool = True
    # The folder of `basic-auth-user` and `basic-auth-password`, as OpenFaaS mounts them. Empty: the
    # folder `secrets` in `state_dir`, where the gateway makes missing files.
    secrets_dir: str = ""
    state_dir: str = ""  # empty: the command line chooses one
    log_level: str = "info"

    # Calls
    max_body_bytes: int = 512 << 20  # far above what a browser or a queue sends; never held whole
    timeout_s: float = 60.0  # of a call; a function's own option takes precedence
    longest_timeout_s: float = 3600.0  # of a function's own limit: so long a call may hold a GPU
    # A call that is expected to wait for longer than this (0: any time), or for half of its time
    # limit, is refused at once. A function's own option takes precedence.
    max_wait_s: float = 5.0
    wake_s: float = 60.0  # how long a call waits for the start of an instance
    drain_s: float = 30.0  # how long calls in flight have at the end of an instance or gateway
    metric_names: int = 1_000  # functions with metrics of their own
    metrics_auth: bool = False  # whether metrics need credentials
    # Names of hosts by which clients reach the gateway, beside addresses and loopback's own names;
    # `*` is every name. Empty: on loopback no other, elsewhere every name.
    allowed_hosts: tuple[str, ...] = ()
    # Hosts that serve functions alone, whose pages are then not sandboxed; `*` is every host.
    function_hosts: tuple[str, ...] = ()

    # Jobs: calls through /async-function
    async_concurrency: int = 16  # jobs that this gateway runs at a time
    async_attempts: int = 10
    async_max_body_bytes: int = 64 << 20
    # Networks (10.0.0.0/8) and hosts (gateway.openfaas:8080) that get callbacks, beside public
    # addresses and this gateway's own functions.
    callback_allowed: tuple[str, ...] = ()
    # How long a receiver may take to answer a callback, beside the time for its body. Functions
    # of this gateway have their own limits instead.
    callback_s: float = 30.0
    async_max_waiting: int = 100_000  # calls of one function
    async_max_waiting_bytes: int = 16 << 30  # of all functions
    async_dead_days: float = 30.0  # how long dead letters are kept
    async_dead_bytes: int = 4 << 30  # of all dead letters

    # Where jobs are kept: `sqlite` in `state_dir`, or NATS JetStream, `nats://HOST:PORT[,...]` or
    # `tls://...`. The other fields are for JetStream.
    queue: str = "sqlite"
    queue_user: str = ""
    queue_password_file: str = ""  # the password of `queue_user`, or a token if that is empty
    queue_ca_file: str = ""
    queue_cert_file: str = ""
    queue_key_file: str = ""
    queue_replicas: int = 1  # servers that store each job
    queue_prefix: str = "gpufaas"  # gateways with the same one share the jobs

    # Workflows
    workflow_runs: int = 1_000  # at a time
    workflow_answer_bytes: int = 16 << 20  # of a request, or of the answer of a stage
    workflow_json_bytes: int = 1 << 20  # of what the gateway itself reads as JSON or joins
    workflow_held_bytes: int = 1 << 30  # of all runs

    scaling: bool = True  # False: the alerts of OpenFaaS scale the functions

    # The process provider
    builds_dir: str = "build"
    roots: tuple[str, ...] = (".",)  # folders that a deployment may name
    base_python: str = ""  # empty: the gateway's own
    visible: tuple[str, ...] = ()  # folders to open to functions below a closed folder

    # Templates: processes that have imported a function and of which its instances are forks
    template_bytes: int = 4 << 30  # of all templates; 0: there are none

    # One build of an environment, which runs code of the packages that a function asks for
    build_network: bool = True
    build_timeout_s: float = 1800.0
    build_memory_bytes: int = 4 << 30
    build_disk_bytes: int = 20 << 30
    builds_at_once: int = 4  # of all functions

    # The docker provider
    docker_url: str = "unix:///var/run/docker.sock"
    docker_tls_dir: str = ""  # ca.pem, cert.pem and key.pem, for an Engine over TLS
    docker_name: str = "gpufaas"  # marks this gateway's objects on the Engine
    docker_network: str = "gpufaas-functions"  # of functions
    # Mounted where GPU functions look for their manager's socket; empty: that folder itself.
    docker_gpu_mount: str = ""
    docker_pull: str = "missing"  # or `always`, `never`
    docker_config: str = ""  # a config.json with the credentials of registries

    # The kubernetes provider
    kubernetes_url: str = "https://kubernetes.default.svc"
    # The folder of `token` and `ca.crt` for the API server.
    kubernetes_credentials_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    kubernetes_name: str = "gpufaas"  # marks this gateway's objects in the cluster
    # The namespaces of functions. Empty: those with the label com.gpufaas.functions=NAME, which can
    # be made and removed.
    kubernetes_namespaces: tuple[str, ...] = ("openfaas-fn",)
    kubernetes_pull: str = "IfNotPresent"  # when images are pulled
    kubernetes_pull_secrets: tuple[str, ...] = ()
    kubernetes_gpu_pod: str = ""  # further fields of the pods of GPU functions, as JSON

    # An upstream provider: any faas-provider, over plain HTTP
    upstream_url: str = ""
    upstream_user: str = ""
    upstream_password_file: str = ""
    upstream_timeout_s: float = 30.0

    @property
    def shows_errors(self) -> bool:
        """Whether callers get the text of functions' errors: those of this machine may."""
        return is_loopback(self.listen)
