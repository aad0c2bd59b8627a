"""Functions as containers of a Docker Engine; containers outlive the gateway and are adopted again.

Requests to the Engine belong to `engine.py`, what the process provider needs too to `managed/`.
"""
