"""What is looked at from time to time: the devices, and what workers take of their memory.

What a look changes is decided elsewhere: the node and its scheduler are told.
"""
