"""Why a group of calls could not run as one."""

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.merging.group_runs import OtherShapes
from gpu_manager.worker.merging.merge_records import Singly
from gpu_manager.worker.merging.merged_run import OtherOutputs, writes_to_shared
from gpu_manager.worker.merging.step_run import WritesElsewhere

# A group that failed so runs singly.
REFUSALS = (CallRefused, OtherOutputs, OtherShapes, WritesElsewhere)

_WHY = {
    OtherOutputs: Singly.DIFFERS,
    OtherShapes: Singly.SHAPES,
    WritesElsewhere: Singly.WRITES,
}
_OF_VALUES = ("data-dependent control flow", ".item()", "dynamic shape")
_OF_RULES = ("Batching rule not implemented", "batching rule")
_OF_CHANCE = "randomness"


def reason_of(error: Exception) -> Singly:
    """Why a merged run failed, by what torch says."""
    text = str(error)
    for kind, why in _WHY.items():
        if isinstance(error, kind):
            return why
    if any(words in text for words in _OF_VALUES):
        return Singly.VALUES
    if _OF_CHANCE in text:
        return Singly.RANDOM
    if writes_to_shared(error):
        return Singly.WRITES
    return Singly.NO_RULE if any(words in text for words in _OF_RULES) else Singly.FAILED
