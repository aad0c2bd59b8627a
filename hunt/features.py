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
_PROVIDERS = "gateway_ext/providers/making.py"
_COMMANDS = "gpufaas/cli.py"
_SCHEDULER = "scheduler/composition.py"
_SERVICE = "scheduler/service/scheduler_service.py"
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
        r"/workflow|\"workflow\"|(gateway|e2e|page)/test_\w*workflow",
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
        "docker",
        ("gateway_ext/providers/docker",),
        (_PROVIDERS,),
        r"docker",
        ("tests/unit/gateway_ext/providers/docker", "tests/integration/docker"),
    ),
    Feature(
        "kubernetes",
        ("gateway_ext/providers/kubernetes",),
        (_PROVIDERS,),
        r"kubernetes",
        ("tests/unit/gateway_ext/providers/kubernetes", "tests/e2e/kubernetes"),
    ),
    Feature(
        "upstream",
        ("gateway_ext/providers/upstream",),
        (_PROVIDERS,),
        r"upstream",
        ("tests/unit/gateway_ext/providers/upstream",),
    ),
    Feature(
        "lists of calls",
        ("gateway_ext/runtime/batches",),
        ("gateway_ext/runtime/process_life.py",),
        r"handle_batch|e2e/test_batches",
        (
            "tests/unit/gateway_ext/runtime/test_handler_batches",
            "tests/kit/processes/batch_runtime",
        ),
    ),
    Feature(
        "tenants",
        ("scheduler/features/tenants", "gpufaas/commands/quota"),
        (_SCHEDULER, _SERVICE, _COMMANDS),
        r"quota|tenancy|calm_tenant|OwnerT|owner_t|priority|turn_order",
        ("tests/unit/scheduler/features/tenants",),
        ("quota",),
    ),
    Feature(
        "billing",
        ("scheduler/features/billing", "gpufaas/commands/bill"),
        (_SERVICE, _COMMANDS),
        r"\bbill|charge|gib_seconds|\bprice",
        ("tests/unit/scheduler/features/billing",),
        ("bill",),
    ),
    Feature(
        "staged exit",
        (
            "scheduler/features/staged_exit",
            "cache_manager/exits/adaptive",
            "cache_manager/exits/fixed",
        ),
        (_SCHEDULER,),
        r"staged|exit_rule|exit-rule|exits\.make|exit_curves|gpu_systems|\bstage_",
    ),
    Feature(
        "standing leases",
        ("scheduler/features/standing_leases",),
        (_SCHEDULER,),
        r"standing(=|_s=|\(|_lease|_slice)|with standing_requests|\.stands\b|let_stand"
        r"|_lease_that_stands|_recalled_lease_ends",
    ),
    Feature(
        "neighbours",
        ("scheduler/features/neighbours",),
        (_SCHEDULER,),
        r"neighbour|slowdown",
        ("tests/unit/scheduler/features/neighbours",),
    ),
    Feature(
        "stages",
        ("scheduler/policies/esg",),  # no root: policies are found
        (),
        r"\"esg\"|policies.esg",
        ("tests/scenarios/esg_batches_a_stage_in_its_time.txt",),
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
        ("gpu_manager/transfers", "gpu_manager/worker/transfers"),
        (_MANAGER, _WORKER),
        r"manager.transfers|_transfers\b|/test_transfer|emulated_paths",
        ("tests/unit/gpu_manager/transfers", "tests/unit/gpu_manager/worker/transfers"),
    ),
    Feature(
        "recorded calls",
        ("gpu_manager/worker/recorded_calls", "torch_shim/remote/recorded_calls"),
        (_WORKER, "torch_shim/start.py"),
        r"recorded_calls|RepeatedCalls",
    ),
)
