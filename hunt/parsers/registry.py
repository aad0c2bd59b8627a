"""Every parser that is tested and fuzzed, and the modules that parse nothing of others."""

from collections.abc import Mapping

from hunt.parsers.parser_target import Target
from hunt.parsers.targets import (
    cluster_targets,
    file_targets,
    http_targets,
    message_targets,
    openfaas_targets,
    shim_targets,
    store_targets,
    stream_targets,
)

PRODUCT = (
    "common", "cache_manager", "scheduler", "gpu_manager", "torch_shim", "gateway_ext", "gpufaas",
)  # fmt: skip
_FILES = (
    shim_targets, stream_targets, http_targets, openfaas_targets, message_targets, store_targets,
    file_targets, cluster_targets,
)  # fmt: skip


def all_targets() -> list[Target]:
    """All of them, room by room."""
    return [target for file in _FILES for target in file.targets()]


_OURS = "it reads what this program, or the package itself, wrote"
_ANSWER = "a command's answer from the server that a person named; it shows what it cannot read"
_PASSES = "it passes what it received on to a parser that is listed"
_TIMES = "four numbers of a worker, which are checked"
_ADDRESS = "it takes an address of this machine's own settings apart"
# Modules that decode something and have no target, and why.
NOT_FUZZED: Mapping[str, str] = {
    "common/compiled_modules.py": _OURS,
    "common/tcp.py": "the kernel wrote it",
    "scheduler/client/operator_client.py": _ANSWER,
    "scheduler/store/etcd_channel.py": _ADDRESS,
    "scheduler/service/streams/nodes.py": _PASSES,
    "gpu_manager/attachment/leader_stream.py": _PASSES,
    "gpu_manager/kernel_locks.py": "the kernel wrote it",
    "gpu_manager/worker/channel_server.py": _PASSES,
    "torch_shim/remote/operators_there.py": _OURS,
    "torch_shim/remote/recorded_calls.py": _TIMES,
    "gpu_manager/devices/image_file.py": "its manager wrote it: eight bytes",
    "gateway_ext/shared_jobs/requests.py": "NATS wrote it, by its client",
    "gateway_ext/jobs/sqlite/queue.py": _OURS,
    "gateway_ext/providers/process/environment_program.py": _OURS,
    "gateway_ext/providers/process/launcher_program.py": _OURS,
    "gateway_ext/providers/upstream/client.py": _ADDRESS,
    "gateway_ext/workflows/parts.py": _PASSES,
    "gpufaas/commands/workflow.py": _ANSWER,
    "gpufaas/extras.py": "whoever installed gpufaas wrote it",
    "gpufaas/stack/etcd_login.py": _ANSWER,
    "gpufaas/shim_counts.py": _OURS,
    "gpufaas/stack_folder.py": _OURS,
    "gpufaas/remote/gateway_api.py": _ANSWER,
    "gpufaas/remote/scheduler_api.py": _ANSWER,
    "gpufaas/stack/examples.py": _ANSWER,
    "gpufaas/stack/part_commands.py": _OURS,
}
