"""What a handle says about itself, and what operators do with handles."""

import pytest
from tests.unit.torch_shim.conftest import Snippet
