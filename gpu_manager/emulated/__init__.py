"""What stands for a GPU on a machine without one: its memory, its arithmetic, its shares."""
