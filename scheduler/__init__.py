"""Places each request on a GPU: a pure core, its policies, the live service and the simulator."""

from common.compiled_modules import prefer_compiled

prefer_compiled()
