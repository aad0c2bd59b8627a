"""The real scheduler service on emulated GPUs, under the load of emulated callers."""
