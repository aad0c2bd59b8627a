"""The tests here read the same sources: one process parses them."""

import pytest

pytestmark = pytest.mark.group("architecture", seconds=15)  # of all modules here
