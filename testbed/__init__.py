"""Worlds that tests and benches share: nodes, providers, pages, callers; no test, no figure."""
