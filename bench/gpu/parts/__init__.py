"""The parts of `make gpu`, one file each: `measure(asked, say)` gives its rows one by one."""
