"""Calls that are taken now and made later: a durable queue, its workers, results by callback."""
