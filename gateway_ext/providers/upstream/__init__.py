"""Functions that another faas-provider runs: deployments are forwarded, its functions are polled.

Nothing here starts a replica; what the other provider does not accept of a deployment is kept here.
"""
