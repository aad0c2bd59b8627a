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
