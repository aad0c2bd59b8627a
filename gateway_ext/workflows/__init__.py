"""Workflows: graphs of deployed functions, read from `workflow.yml`, stored, run stage by stage.

A stage is a call as a client's own: limits, leases and starts of instances are those of `calls`.
"""
