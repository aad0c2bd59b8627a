"""Drives the core on virtual time: workloads, the engine, statistics, replays of recordings."""
