"""The datastore behind one port, in etcd or in memory, and what is kept in it and read back."""
