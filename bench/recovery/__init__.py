"""How long a stack answers nobody after one of its processes is killed or frozen."""
