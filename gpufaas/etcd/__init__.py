"""The etcd that this machine runs for itself: the program, its start, its password."""
