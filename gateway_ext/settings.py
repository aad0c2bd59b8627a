"""The settings of a gateway: one frozen value, built at the entry point."""

from dataclasses import dataclass

from gateway_ext.sites import is_loopback


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway; its keys are those of `gpufaas.toml`, table `[gateway]`.

    `role` is what `/system/info` answers: `gateway` to faas-cli, or `provider` behind the gateway
    of OpenFaaS. `provider` names what runs functions: `process`, `docker`, `kubernetes`
    or `upstream`.
    `secrets_dir` holds `basic-auth-user` and `basic-auth-password`, as OpenFaaS mounts them; empty
    is the folder `secrets` in `state_dir`, where missing files are made. Without a `state_dir` the
    command line chooses one. The limit on a body, `max_body_bytes`, is far above what a browser or
    a queue sends; bodies are streamed, never held.
    """

    listen: str = "127.0.0.1:8080"
    role: str = "gateway"
    provider: str = "process"
    auth: bool = True
    secrets_dir: str = ""
    state_dir: str = ""
    log_level: str = "info"

    # Calls: the default time limit of a call, and how long it waits for an instance and for the
    # start of one. A call that is expected to wait for its turn for longer than
    # `max_wait_s` (0: any time), or for half of its time limit, is refused at once. A function's
    # own options take precedence over `timeout_s` and `max_wait_s`; its own time limit is at most
    # `longest_timeout_s`, for so long one call may hold a GPU.
    max_body_bytes: int = 512 << 20
    timeout_s: float = 60.0
    longest_timeout_s: float = 3600.0
    max_wait_s: float = 5.0
    wake_s: float = 60.0
    drain_s: float = 30.0
    # The number of functions with metrics of their own; whether metrics need credentials.
    metric_names: int = 1_000
    metrics_auth: bool = False
    # Names of hosts by which clients reach the gateway, beside addresses and loopback's own names;
    # `*` is every name. None: on loopback no other, elsewhere every name.
    allowed_hosts: tuple[str, ...] = ()
    # Hosts that serve functions alone, whose pages are then not sandboxed; `*` is every host.
    function_hosts: tuple[str, ...] = ()

    # Jobs: calls through /async-function.
    async_concurrency: int = 16
    async_attempts: int = 10
    async_max_body_bytes: int = 64 << 20
    # Callbacks go to public addresses, to this gateway's own functions, and to `callback_allowed`:
    # networks (10.0.0.0/8) and hosts (gateway.openfaas:8080).
    callback_allowed: tuple[str, ...] = ()
    # How long a receiver may take to answer a callback, beside the time for its body. Functions
    # of this gateway have their own limits instead.
    callback_s: float = 30.0
    # The limits on waiting calls, of one function and in all; how long, and how many bytes of, dead
    # letters are kept.
    async_max_waiting: int = 100_000
    async_max_waiting_bytes: int = 16 << 30
    async_dead_days: float = 30.0
    async_dead_bytes: int = 4 << 30

    # Where jobs are kept: `sqlite` in `state_dir`, or NATS JetStream, `nats://HOST:PORT[,...]` or
    # `tls://...`, which gateways with one `queue_prefix` share. `queue_password_file` has the
    # password of `queue_user`, or a token if that is empty. `queue_replicas` is the number of
    # servers that store each job.
    queue: str = "sqlite"
    queue_user: str = ""
    queue_password_file: str = ""
    queue_ca_file: str = ""
    queue_cert_file: str = ""
    queue_key_file: str = ""
    queue_replicas: int = 1
    queue_prefix: str = "gpufaas"

    # Workflows: how many may run at a time, how large a request or the answer of a stage may be,
    # how much of it the gateway itself reads as JSON or joins, and how much all of them may hold.
    workflow_runs: int = 1_000
    workflow_answer_bytes: int = 16 << 20
    workflow_json_bytes: int = 1 << 20
    workflow_held_bytes: int = 1 << 30

    # Whether this gateway scales functions; else the alerts of OpenFaaS do.
    scaling: bool = True

    # The process provider: where builds are, folders that a deployment may name, which Python to
    # use, and folders that functions must reach although a folder above is closed to their users.
    builds_dir: str = "build"
    roots: tuple[str, ...] = (".",)
    base_python: str = ""
    visible: tuple[str, ...] = ()

    # Templates: processes that have imported a function and of which its instances are forks. How
    # much memory all of them may take (0: there are none).
    template_bytes: int = 4 << 30

    # One build of an environment, which runs code of the packages that a function asks for: whether
    # it has a network, and how much it may use; how many builds run at a time.
    build_network: bool = True
    build_timeout_s: float = 1800.0
    build_memory_bytes: int = 4 << 30
    build_disk_bytes: int = 20 << 30
    builds_at_once: int = 4

    # The docker provider: which Engine (and the folder with ca.pem, cert.pem, key.pem for one over
    # TLS), the name that marks this gateway's objects there, the network of functions, what is
    # mounted where GPU functions look for their manager's socket (empty: that folder itself), when
    # images are pulled (`missing`, `always`, `never`) and with which credentials (a config.json).
    docker_url: str = "unix:///var/run/docker.sock"
    docker_tls_dir: str = ""
    docker_name: str = "gpufaas"
    docker_network: str = "gpufaas-functions"
    docker_gpu_mount: str = ""
    docker_pull: str = "missing"
    docker_config: str = ""

    # The kubernetes provider: which API server and the folder with `token` and `ca.crt` for it, the
    # name that marks this gateway's objects there, the namespaces of functions (none: those of the
    # cluster with the label com.gpufaas.functions=NAME, which can be made and removed), when images
    # are pulled and with which secrets, and further fields of the pods of GPU functions, as JSON.
    kubernetes_url: str = "https://kubernetes.default.svc"
    kubernetes_credentials_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    kubernetes_name: str = "gpufaas"
    kubernetes_namespaces: tuple[str, ...] = ("openfaas-fn",)
    kubernetes_pull: str = "IfNotPresent"
    kubernetes_pull_secrets: tuple[str, ...] = ()
    kubernetes_gpu_pod: str = ""

    # An upstream provider: any faas-provider, over plain HTTP.
    upstream_url: str = ""
    upstream_user: str = ""
    upstream_password_file: str = ""
    upstream_timeout_s: float = 30.0

    @property
    def shows_errors(self) -> bool:
        """Whether callers get the text of functions' errors: those of this machine may."""
        return is_loopback(self.listen)
