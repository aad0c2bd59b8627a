"""What models leave behind as they step down: empty processes, stored weights, and their reports.

When a model steps down is the scheduler's decision, and does not belong here.
"""
