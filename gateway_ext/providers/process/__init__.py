"""Functions as processes of this machine: no container engine, nothing left after removal."""
