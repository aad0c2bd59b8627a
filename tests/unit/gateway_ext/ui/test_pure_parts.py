"""Changes, names, alerts and percentiles: the computations without requests."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.numerals import name_sort_key
from gateway_ext.calls.function_table import Functions
from gateway_ext.metrics import BOUNDS_S, GatewayMeters
from gateway_ext.model import Deployment, Endpoint, FunctionId
from gateway_ext.ui.cluster_source import alerts
from gateway_ext.ui.rows import FunctionRows, percentile
from gateway_ext.ui.shown_names import full_name, short_model, shown_function
from gateway_ext.ui.state import PageState, changes

ITEMS = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(0, 2).map(lambda value: {"value": value})
)


@given(ITEMS, ITEMS, st.integers(0, 1), st.integers(0, 1))
def test_changes_lead_from_one_look_to_the_other(
    old: dict[str, Any], new: dict[str, Any], before: int, after: int
) -> None:
    looks = [
        PageState(
            {"queue": queue}, {"gpus": {key: {"id": key, **item} for key, item in items.items()}}
        )
        for items, queue in ((old, before), (new, after))
    ]
    found = changes(*looks)
    items = dict(looks[0].items["gpus"])
    gpus = found.get("gpus", {"removed": [], "replaced": []})
    for gone in gpus["removed"]:
        del items[gone]
    for item in gpus["replaced"]:
        assert items.get(item["id"]) != item, "it is as it was"
        items[item["id"]] = item
    assert items == looks[1].items["gpus"]
    assert found.get("queue", before) == after
    assert bool(found) == (looks[0] != looks[1])


def test_functions_are_called_as_people_call_them() -> None:
    assert shown_function("openfaas-fn/reader") == "reader"
    assert shown_function("team/reader") == "reader.team"
    assert shown_function("odd") == "odd"
    assert full_name("openfaas-fn/reader") == str(FunctionId("openfaas-fn", "reader"))
    assert short_model("team/0123456789abcdef0123") == "01234567"


def test_names_are_sorted_as_people_count() -> None:
    names = ["n10/cuda:0", "n9/cuda:10", "n9/cuda:9", "n", "1n"]
    assert sorted(names, key=name_sort_key) == ["1n", "n", "n9/cuda:9", "n9/cuda:10", "n10/cuda:0"]


def test_percentile_is_within_its_range() -> None:
    nothing = [0] * (len(BOUNDS_S) + 1)
    assert percentile(nothing, 0.95) is None
    assert percentile((), 0.95) is None
    half = nothing.copy()
    half[BOUNDS_S.index(0.5)] = 100
    assert percentile(half, 0.95) == 0.25 + 0.25 * 0.95
    endless = nothing.copy()
    endless[-1] = 3
    assert percentile(endless, 0.95) == BOUNDS_S[-1]


# -- alerts -------------------------------------------------------------------------------------


def whole(**more: Any) -> dict[str, Any]:
    """Of a cluster that is well."""
    well = {
        "scheduler": {"ok": True, "why": "", "etcd": "ok", "skew_s": 0.0},
        "queue": {"head": []},
        "totals": {"hit_ratio": 0.9, "rate": 10.0, "requests": 1000},
        "dead_letters": {"count": 0, "why": ""},
    }
    return well | more


def gpu(**more: Any) -> dict[str, Any]:
    usual = {"id": "g0", "node": "n0", "state": "idle", "withheld_bytes": 0, "total_bytes": 9}
    return usual | {"stuck": []} | more


def function(**more: Any) -> dict[str, Any]:
    replicas = {"wanted": 1, "replicas": 1, "waiting": 0, "late": False}
    well = {
        "trouble": "",
        "part_trouble": "",
        "dying": "",
        "template_trouble": "",
        "log_command": "faas-cli logs f -n x",
    }
    return {"id": "f.x", "name": "f", **replicas, **well} | more


def codes(*gpus: Any, functions: Any = (), **more: Any) -> list[str]:
    return [alert["code"] for alert in alerts(whole(**more), gpus, functions)]


def test_cluster_that_is_well_has_no_alert() -> None:
    assert codes(gpu(), functions=[function()]) == []


def test_alerts_are_listed_the_worst_first() -> None:
    down = {"ok": False, "why": "no scheduler leads", "etcd": "ok", "skew_s": 0.0}
    assert codes(gpu(state="silent"), scheduler=down) == ["no-scheduler", "gpu-silent"]
    assert codes(scheduler=down) == [
        "no-scheduler"
    ]  # without an answer, GPUs are unknown, not missing
    assert codes() == ["no-gpus"]
    lost = {"ok": True, "why": "", "etcd": "lost", "skew_s": 0.0}
    assert codes(gpu(), scheduler=lost) == ["store-lost"]
    late = lost | {"etcd": "ok", "skew_s": -7.0}
    assert codes(gpu(), scheduler=late) == ["clocks-differ"]
    assert codes(gpu(withheld_bytes=5)) == ["gpu-taken"]
    assert codes(gpu(), queue={"head": [{"waited_s": 31.0}]}) == ["long-wait"]
    thrashing = {"hit_ratio": 0.1, "rate": 10.0, "requests": 1000}
    assert codes(gpu(), totals=thrashing) == ["thrashing"]
    assert codes(gpu(), totals=thrashing | {"requests": 5}) == []
    assert codes(gpu(), functions=[function(replicas=0, waiting=2)]) == ["no-replica"]
    assert codes(gpu(), functions=[function(replicas=0, late=True)]) == ["no-replica"]
    assert codes(gpu(), functions=[function(replicas=0)]) == []
    assert codes(gpu(), dead_letters={"count": 1, "why": ""}) == ["dead-letters"]
    assert codes(gpu(), dead_letters={"count": 0, "why": "it is away"}) == ["jobs-away"]


@pytest.mark.parametrize("waiting", [0, 2])
def test_alert_says_why_a_function_does_not_start_and_how_to_see_its_log(waiting: int) -> None:
    broken = function(replicas=0, waiting=waiting, trouble="ValueError: no")
    (alert,) = alerts(whole(), [gpu()], [broken])
    assert (alert["code"], alert["text"]) == (
        "does-not-start",
        "f.x does not start: ValueError: no",
    )
    assert "faas-cli logs f -n x" in alert["what_to_do"]


@pytest.mark.parametrize("replicas", [0, 1])
def test_alert_says_what_does_not_start_when_others_serve_or_may_do_so(replicas: int) -> None:
    (alert,) = alerts(whole(), [gpu()], [function(replicas=replicas, part_trouble="no package")])
    assert alert["text"] == "f.x has an instance that does not start: no package"


def test_alert_says_how_instances_end_again_and_again() -> None:
    dying = function(replicas=1, dying="was ended by SIGSEGV (3 times)")
    (alert,) = alerts(whole(), [gpu()], [dying])
    assert (alert["code"], alert["text"]) == (
        "keeps-ending",
        "instances of f.x end again and again; the last one was ended by SIGSEGV (3 times)",
    )
    assert "faas-cli logs f -n x" in alert["what_to_do"]


def test_alert_says_that_a_template_is_not_warm() -> None:
    (alert,) = alerts(whole(), [gpu()], [function(template_trouble="it was answered 400")])
    assert (alert["code"], "it was answered 400" in alert["text"]) == ("not-warm", True)


def test_alerts_of_features_are_among_those_of_functions() -> None:
    told = {"level": "warning", "code": "told", "about": "w.n", "text": "no", "what_to_do": "mend"}
    assert alerts(whole(), [gpu()], (), [told]) == [told]


def test_load_without_progress_is_named_with_model_function_node_gpu_and_since_when() -> None:
    load = {"model": "team/0123456789abcdef", "functions": ["openfaas-fn/story"], "since_s": 61.0}
    (alert,) = alerts(whole(), [gpu(stuck=[load])], ())
    assert (alert["code"], alert["about"]) == ("load-stuck", "g0")
    assert alert["text"] == (
        "the load of 01234567 for story on g0 of n0 has made no progress since 00:01:01 UTC"
    )
    assert codes(gpu(stuck=[])) == []


def test_alerts_are_few_enough_to_read() -> None:
    broken = [function(id=f"f{number}.n{number % 30}", trouble="no") for number in range(200)]
    found = alerts(whole(), [gpu()], broken)
    assert (len(found), found[-1]["text"]) == (50, "and 151 more of functions and workflows")
    silent = [gpu(id=f"g{number}", state="silent") for number in range(200)]
    assert [alert["text"] for alert in alerts(whole(), silent, ())][-1] == (
        "and 190 more of the GPUs like these: gpu-silent"
    )


def test_alerts_of_a_namespace_crowd_out_nobody_elses_when_it_has_many() -> None:
    evil = [function(id=f"f{number}.evil", trouble="no") for number in range(60)]
    victim = function(id="important.victims", trouble="no")
    letters = {"count": 9, "why": ""}
    found = alerts(whole(dead_letters=letters), [gpu()], [*evil, victim])
    assert [alert["about"] for alert in found[:3]] == [
        "dead_letters",
        "f0.evil",
        "important.victims",
    ]
    assert found[-1]["text"] == "and 50 more of evil like these: does-not-start"
    assert len(found) == 1 + 10 + 1 + 1
    keys = {(alert["code"], alert["about"]) for alert in found}
    assert len(keys) == len(found)


def test_alerts_of_gpus_are_shown_when_many_namespaces_have_alerts() -> None:
    silent = [gpu(id=f"g{number}", state="silent") for number in range(12)]
    broken = [
        function(id=f"f{number}.n{namespace}", part_trouble="no", template_trouble="no")
        for namespace in range(30)
        for number in range(20)
    ]
    found = alerts(whole(), silent, broken)
    assert [alert["code"] for alert in found[:11]] == ["gpu-silent"] * 11
    assert found[10]["text"] == "and 2 more of the GPUs like these: gpu-silent"
    assert len(found) == 50
    left_out = 2 * len(broken) - (50 - 11 - 1)
    assert found[-1]["text"] == f"and {left_out} more of functions and workflows"


def test_function_is_late_when_it_has_had_no_instance_for_a_minute() -> None:
    functions = Functions()
    rows = FunctionRows(functions, GatewayMeters())
    deployment = Deployment(FunctionId("x", "f"), "image")

    def late(now_s: float) -> bool:
        return bool(rows.look({}, {}, now_s)["f.x"]["late"])

    functions.function_is(deployment, [], wanted=1)
    assert [late(0.0), late(59.0), late(61.0)] == [False, False, True]
    functions.function_is(deployment, [Endpoint("f-1", "unix:/f")], wanted=1)
    assert not late(62.0)
    functions.function_is(deployment, [], wanted=0)
    assert not late(200.0), "nobody wants one"
