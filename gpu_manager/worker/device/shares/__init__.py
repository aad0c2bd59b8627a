"""Shares of a GPU: multiprocessors of a real one, threads of an emulated one."""
