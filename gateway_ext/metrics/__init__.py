"""The gateway's metrics: their declarations and counters."""
