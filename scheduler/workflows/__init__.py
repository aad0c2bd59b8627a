"""Workflows with a deadline: graphs, time budgets, configurations and where they run. Pure.

Nothing here runs a stage, or knows a GPU manager: who asks has the queues, the clock and the nodes.
"""
