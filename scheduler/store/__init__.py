"""The datastore behind one port, in etcd or in memory, and the records kept in it."""
