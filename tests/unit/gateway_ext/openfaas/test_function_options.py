"""Options of functions: every way to set one, and the error of a wrong one."""

import re
from typing import Any

import pytest

from common.gpu_wishes import GpuWishes
from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment, FunctionId, Resources
from gateway_ext.openfaas import function_options
from gateway_ext.openfaas.function_options import HandlerBatches
from tests.kit.outcomes import instead_of


def deployment(**more: Any) -> Deployment:
    return Deployment(FunctionId("openfaas-fn", "f"), "image", **more)


def ours(**given: str) -> function_options.FunctionOptions:
    return function_options.of(
        deployment(annotations={f"com.gpufaas.{key}": given[key] for key in given})
    )


def scaled(**given: str) -> function_options.FunctionOptions:
    labels = {f"com.openfaas.scale.{key.replace('_', '-')}": given[key] for key in given}
    return function_options.of(deployment(labels=labels))


def test_a_plain_function_has_the_default_options() -> None:
    assert function_options.of(deployment()) == function_options.FunctionOptions()


@pytest.mark.parametrize(("text", "merged"), [("off", 1), (" Default ", 0), ("1", 1), ("12", 12)])
def test_the_most_calls_that_run_as_one_are_read(text: str, merged: int) -> None:
    assert ours(batch=text).wishes == GpuWishes(merged=merged)


@pytest.mark.parametrize(
    "more",
    [
        {"process": "python /home/app/runtime --gpu"},
        {"labels": {"com.gpufaas.enabled": "true"}},
        {"annotations": {"com.gpufaas.enabled": "1"}},
        {"annotations": {"com.openfaas.profile": "small, nvidia-gpu"}},
        {"labels": {"com.openfaas.profile": "GPU"}},
        {"limits": Resources(gpu="1")},
        {"requests": Resources(gpu="2")},
        {"constraints": ("zone=a", "nvidia.com/gpu.present=true")},
    ],
)
def test_a_function_is_one_for_gpus_when_it_asks_for_one_in_any_way(more: dict[str, Any]) -> None:
    assert function_options.of(deployment(**more)).gpu


@pytest.mark.parametrize(
    "more",
    [
        {"process": "python --gpus"},
        {"limits": Resources(gpu="0", memory="1Gi")},
        {"constraints": ("zone=nvidia.com/gpu",)},
        {"annotations": {"com.openfaas.profile": "small"}},
    ],
)
def test_a_function_is_none_for_gpus_when_it_does_not_quite_ask_for_one(
    more: dict[str, Any],
) -> None:
    assert not function_options.of(deployment(**more)).gpu


def test_enabled_false_beats_every_other_way() -> None:
    given = deployment(
        process="x --gpu",
        labels={"com.gpufaas.enabled": "false"},
        annotations={"com.gpufaas.enabled": "true"},
        limits=Resources(gpu="1"),
    )
    assert not function_options.of(given).gpu


def test_our_annotations_are_read() -> None:
    assert ours(
        model="a, b",
        memory="2GiB",
        batch="8",
        slo="250ms",
        priority="-3",
        retry="idempotent",
        retries="0",
        keep="true",
        timeout="2m",
        workers="3",
        concurrency="4",
        queue="0",
    ) == function_options.FunctionOptions(
        models=("a", "b"),
        memory_bytes=2 << 30,
        wishes=GpuWishes(merged=8),
        slo_s=0.25,
        priority=-3,
        retry=True,
        retries=0,
        keep=True,
        timeout_s=120.0,
        workers=3,
        concurrency=4,
        queue=0,
    )


def test_the_runtime_is_a_wish_for_the_gpu() -> None:
    assert ours(runtime="Stream").wishes == GpuWishes("stream")
    assert ours().wishes == GpuWishes()


@pytest.mark.parametrize("text", ["0.25", "25%", " 25 % "])
def test_a_share_is_a_number_or_a_percentage(text: str) -> None:
    assert ours(share=text, runtime="stream").wishes == GpuWishes("stream", 0.25)


def test_scaling_labels_are_read() -> None:
    assert scaled(
        min="2",
        max="9",
        factor="50",
        zero="true",
        zero_duration="15m",
        target="10",
        type="rps",
        target_proportion="0.7",
    ) == function_options.FunctionOptions(
        scale_min=2,
        scale_max=9,
        scale_factor=50,
        scale_zero=True,
        scale_zero_after_s=900.0,
        scale_target=10.0,
        scale_type="rps",
        scale_proportion=0.7,
    )


def test_a_lone_minimum_raises_the_maximum() -> None:
    assert scaled(min="8").scale_max == 8


def test_a_minimum_of_zero_is_one_since_going_to_zero_has_a_label_of_its_own() -> None:
    assert scaled(min="0").scale_min == 1


def test_an_annotation_goes_before_a_label() -> None:
    given = deployment(labels={"com.gpufaas.batch": "2"}, annotations={"com.gpufaas.batch": "4"})
    assert function_options.of(given).wishes.merged == 4


@pytest.mark.parametrize(
    ("annotations", "batches"),
    [
        ({}, HandlerBatches(0, 0.0)),
        ({"batch-handler": "32"}, HandlerBatches(32, 0.0)),
        ({"batch-handler": "8", "batch-wait": "5ms"}, HandlerBatches(8, 0.005)),
        ({"batch-handler": "8", "retry": "idempotent"}, HandlerBatches(8)),
        ({"batch-handler": "8", "retry": "never"}, HandlerBatches(8, repeats=False)),
    ],
)
def test_annotations_say_how_many_calls_the_handler_takes(
    annotations: dict[str, str], batches: HandlerBatches
) -> None:
    given = {f"com.gpufaas.{name}": value for name, value in annotations.items()}
    assert function_options.of(deployment(annotations=given)).batches[:2] == batches[:2]
    if batches.most:
        assert function_options.of(deployment(annotations=given)).batches == batches


def test_wait_for_other_calls_is_refused_for_a_handler_of_single_calls() -> None:
    with pytest.raises(BadDeployment, match="batch-handler"):
        function_options.of(deployment(annotations={"com.gpufaas.batch-wait": "5ms"}))


@pytest.mark.parametrize(
    ("environment", "timeout_s"),
    [
        ({}, 33.0),
        ({"exec_timeout": "1h"}, 3600.0),
        ({"exec_timeout": "0s", "write_timeout": "20"}, 20.0),
        ({"read_timeout": "5s"}, 5.0),
        ({"exec_timeout": ""}, 33.0),
    ],
)
def test_timeout_comes_from_the_environment_as_the_watchdog_has_it(
    environment: dict[str, str], timeout_s: float
) -> None:
    assert function_options.of(deployment(environment=environment), 33.0).timeout_s == timeout_s


def test_our_annotation_for_the_timeout_goes_before_the_environment() -> None:
    given = deployment(
        environment={"exec_timeout": "1h"}, annotations={"com.gpufaas.timeout": "5s"}
    )
    assert function_options.of(given).timeout_s == 5.0


@pytest.mark.parametrize(("given", "limit"), [("12", 12), ("0", None), ("", None)])
def test_max_inflight_is_the_concurrency_of_an_instance(given: str, limit: int | None) -> None:
    assert function_options.of(deployment(environment={"max_inflight": given})).concurrency == limit


WRONG_VALUES = (
    ("com.gpufaas.enabled", "maybe"),
    ("com.gpufaas.memory", "lots"),
    ("com.gpufaas.memory", "0"),
    ("com.gpufaas.batch", "0"),
    ("com.gpufaas.batch-handler", "0"),
    ("com.gpufaas.batch-handler", "257"),
    ("com.gpufaas.batch-handler", "many"),
    ("com.gpufaas.batch-wait", "11s"),
    ("com.gpufaas.slo", "0s"),
    ("com.gpufaas.slo", "5 s"),
    ("com.gpufaas.priority", "high"),
    ("com.gpufaas.priority", "--1"),
    ("com.gpufaas.retry", "always"),
    ("com.gpufaas.timeout", "-5s"),
    ("com.gpufaas.workers", "1.5"),
    ("com.gpufaas.concurrency", "²"),
    ("com.gpufaas.runtime", "thread"),
    ("com.gpufaas.share", "0"),
    ("com.gpufaas.share", "25"),
    ("com.gpufaas.share", "120%"),
    ("com.gpufaas.share", "nan"),
    ("com.gpufaas.share", "a quarter"),
    ("com.openfaas.scale.min", "-1"),
    ("com.openfaas.scale.max", "0"),
    ("com.openfaas.scale.factor", "101"),
    ("com.openfaas.scale.target", "nan"),
    ("com.openfaas.scale.target", "inf"),
    ("com.openfaas.scale.target", "many"),
    ("com.openfaas.scale.target", "-1"),
    ("com.openfaas.scale.type", "cpu"),
    ("com.openfaas.scale.proportion", "1.1"),
    ("com.openfaas.scale.proportion", "0"),
    ("com.openfaas.scale.zero-duration", "soon"),
)


def test_a_wrong_value_is_named_with_its_key() -> None:
    wrong = []
    for key, value in WRONG_VALUES:
        named = re.escape(f"{key}: {value!r}: ")
        given = deployment(labels={key: value})
        if taken := instead_of(BadDeployment, function_options.of, given, match=named):
            wrong.append((key, value, taken))
    assert wrong == []


def test_a_load_is_never_divided_by_almost_nothing() -> None:
    """Functions that were deployed by an earlier version may have such labels."""
    found = scaled(target="1e-310", proportion="1e-200")
    assert (found.scale_target, found.scale_proportion) == (0.001, 0.01)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(BadDeployment, match=r"exec_timeout: '1 hour'"):
        function_options.of(deployment(environment={"exec_timeout": "1 hour"}))


def test_a_maximum_below_the_minimum_is_refused() -> None:
    with pytest.raises(BadDeployment, match=r"scale\.max: '2': it is less than .*scale\.min, 3"):
        scaled(min="3", max="2")


@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_more_memory_than_the_largest_gpu_has_is_refused_by_name(where: str) -> None:
    wanted = deployment(**{where: {"com.gpufaas.memory": "80GiB"}})
    with pytest.raises(BadDeployment) as refused:
        function_options.refuse_beyond(wanted, 16 << 30)
    assert str(refused.value) == "com.gpufaas.memory: 80GiB: the largest GPU has 16 GiB"


@pytest.mark.parametrize("given", [{}, {"com.gpufaas.memory": "16GiB"}])
def test_as_much_memory_as_the_largest_gpu_has_is_accepted(given: dict[str, str]) -> None:
    function_options.refuse_beyond(deployment(annotations=given), 16 << 30)
    with pytest.raises(BadDeployment):
        function_options.refuse_beyond(
            deployment(annotations={"com.gpufaas.memory": "16385Mi"}), 16 << 30
        )


def test_a_key_of_ours_that_is_not_known_is_refused_with_those_that_are() -> None:
    nearest = r"com\.gpufaas\.memmory is not known: did you mean com\.gpufaas\.memory\? known: "
    with pytest.raises(BadDeployment, match=nearest) as refused:
        ours(memmory="1Gi")
    assert "com.gpufaas.path" in str(refused.value)
    assert "trouble" not in str(refused.value), "nobody may set it"
    with pytest.raises(BadDeployment, match=r"com\.gpufaas\.0 is not known: known: "):
        ours(**{"0": "1"})
