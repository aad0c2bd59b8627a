"""Functions as processes of this machine: no container engine, nothing left after removal.

What the docker provider needs too belongs to `managed/`.
"""
