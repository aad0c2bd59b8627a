"""Functions as Deployments of a Kubernetes cluster, whose API server keeps what is known of them.

No file of this machine is written here, and no other provider is asked.
"""
