"""The thesis's chapter 5 through gateway, shim and workers, on emulated GPUs."""
