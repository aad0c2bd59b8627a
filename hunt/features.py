"""The features that can leave: their folders, their roots, and how tests name them."""

from typing import NamedTuple


class Feature(NamedTuple):
    """One thing that a user can do without."""

    name: str
    product: tuple[str, ...]  # its folders and modules
    # What may name it: each by one import, and one element of a tuple or one statement.
    roots: tuple[str, ...]
    words: str  # a regular expression: tests that match it are tests of the feature
    tests: tuple[str, ...] = ()  # its tests' own folders and modules
    elements: tuple[str, ...] = ()  # strings that a root has in a tuple: commands


_GATEWAY = "gateway_ext/gateway.py"
_COMMANDS = "gpufaas/cli.py"
_SCHEDULER = "scheduler/composition.py"
_WORKER = "gpu_manager/worker/life.py"
_MANAGER = "gpu_manager/daemon.py"

FEATURES = (
    Feature(
        "workflows",
        (
            "gateway_ext/workflows",
            "gpufaas/commands/workflow",
            "gpufaas/output/workflow_text",
            "gpufaas/stack/workflow_example",
        ),
        (_GATEWAY, _COMMANDS, "gpufaas/stack/examples.py"),
        r"workflow",
        ("tests/unit/gateway_ext/workflows", "tests/unit/gpufaas/output/test_workflow_text"),
        ("workflow",),
    ),
    Feature(
        "page",
        ("gateway_ext/ui",),
        (_GATEWAY,),
        r"/ui\b|\bpage_world|gateway's page",
        ("tests/unit/gateway_ext/ui", "tests/kit/page"),
    ),
    Feature(
        "shared jobs",
        ("gateway_ext/shared_jobs",),
        (_GATEWAY, "hunt/seeds/simulation.py"),
        r"jetstream|nats\b|shared_jobs",
        ("tests/unit/gateway_ext/shared_jobs", "hunt/seeds/shared_queue"),
    ),
    Feature(
        "tenants",
        ("scheduler/features/tenants", "gpufaas/commands/quota"),
        (_SCHEDULER, _COMMANDS),
        r"quota|tenancy|OwnerT|owner_t|priority|turn_order",
        ("tests/unit/scheduler/features/tenants",),
        ("quota",),
    ),
    Feature(
        "billing",
        ("scheduler/features/billing", "scheduler/service/bill", "gpufaas/commands/bill"),
        (_SCHEDULER, _COMMANDS),
        r"\bbill|charge|gib_seconds|\bprice",
        ("tests/unit/scheduler/features/billing",),
        ("bill",),
    ),
    Feature(
        "staged exit",
        ("scheduler/features/staged_exit", "cache_manager/exits"),
        (_SCHEDULER,),
        r"staged|exit_rule|exit-rule|\bstage_",
    ),
    Feature(
        "standing leases",
        ("scheduler/features/standing_leases",),
        (_SCHEDULER,),
        r"standing|stands",
    ),
    Feature(
        "neighbours",
        ("scheduler/cluster/side_by_side", "scheduler/estimates/slowdowns"),
        (_SCHEDULER,),
        r"neighbour|slowdown|beside",
    ),
    Feature(
        "stages",
        ("scheduler/workflows",),
        (_SCHEDULER,),
        r"workflow|\bdag\b|\bslo|\besg",
        ("tests/unit/scheduler/workflows",),
    ),
    Feature(
        "merging",
        ("gpu_manager/worker/merging",),
        (_WORKER,),
        r"merging|merged_calls|generation_together",
        ("tests/unit/gpu_manager/worker/merging",),
    ),
    Feature(
        "data",
        ("gpu_manager/data", "gpu_manager/worker/data", "torch_shim/data"),
        (_MANAGER, _WORKER, "torch_shim/start.py"),
        r"passed_data|put_and_get|data_functions|torch_shim\.data",
        (
            "tests/unit/gpu_manager/data",
            "tests/unit/gpu_manager/worker/data",
            "tests/kit/nodes/in_memory_data",
            "tests/unit/torch_shim/data",
        ),
    ),
    Feature(
        "streams",
        ("gpu_manager/runtimes/stream",),
        ("gpufaas/embedded_node.py",),
        r"/test_streams(\.|_of_|_on_)|test_stream_troubles|ChosenRuntime",
    ),
    Feature(
        "transfers",
        ("gpu_manager/transfers",),
        (_MANAGER,),
        r"manager.transfers|_transfers\b|/test_transfer|emulated_paths",
        ("tests/unit/gpu_manager/transfers",),
    ),
)
