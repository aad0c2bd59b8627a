"""Drives the core on virtual time: workloads, the engine, statistics, the thesis's evaluation."""
