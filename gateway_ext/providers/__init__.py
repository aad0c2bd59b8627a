"""Where functions run: a folder for each kind of place, `managed/` for what two of them share.

Code that starts, watches or lists functions belongs here; HTTP routes, scaling and calls do not.
"""
