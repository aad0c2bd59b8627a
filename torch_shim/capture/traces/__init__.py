"""How the shim traces beside other threads: settings, snapshots, tensor classes, background."""
