"""Processes and streams on one emulated GPU: memory of many functions, calls at equal memory."""
