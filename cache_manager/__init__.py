"""Which GPU holds which model, in what order, and what leaves when room is needed."""

from common.compiled_modules import prefer_compiled

prefer_compiled()
