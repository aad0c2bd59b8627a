"""What several folders of the product need; it imports none of them.

Neither the shim nor a function's runtime uses it: they run in users' containers.
"""
