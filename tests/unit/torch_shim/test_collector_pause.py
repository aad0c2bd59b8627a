"""The collector rests while torch and Dynamo are imported, and is as before afterwards."""

import gc

from tests.kit.programs.snippets import Snippet
from torch_shim.collector_pause import without_collections


def test_collector_rests_inside_and_goes_on_afterwards() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_stays_off_when_it_was_off_before() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collector_is_on_when_torch_and_what_traces_need_are_imported(
    tracing_shim: Snippet,
) -> None:
    tracing_shim("""
    import gc
    from torch_shim.capture import module_calls
    assert gc.isenabled()
    module_calls.import_tracing()
    assert gc.isenabled()
    """)
