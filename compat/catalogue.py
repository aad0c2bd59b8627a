"""The programs of the compatibility suite: what to run, with which arguments, and how close."""

from compat.entries.everyday import everyday_entries
from compat.entries.language import language_entries
from compat.entries.libraries import library_entries
from compat.entries.recipes import recipe_entries
from compat.entries.torch_subjects import torch_entries
from compat.entries.transformers_families import transformers_entries
from compat.entries.vision import vision_entries
from compat.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *vision_entries(),
    *language_entries(),
    *transformers_entries(),
    *torch_entries(),
    *library_entries(),
    *everyday_entries(),
    *recipe_entries(),
)
QUICK = tuple(entry for entry in ENTRIES if entry.quick)
_DOZEN = {
    "lstm_carried_state",
    "packed_sequences",
    "torch_functions spectra",
    "function_transforms jacobian",
    "control_flow",
    "inplace_updates",
    "hooks",
    "selected_values",
    "input_gradients",
    "threaded_requests",
    "save_and_load",
    "training_recipes gan",
}
# Those that `make test` runs; `make test-engines` runs the other quick ones.
DOZEN = tuple(entry for entry in ENTRIES if entry.name in _DOZEN)
