"""What the docker and the process provider share: records, versions, replicas, logs, secrets.

Code that knows what a container or a process is does not belong here.
"""
