"""Which graph may answer a call, and that graph as a program."""
