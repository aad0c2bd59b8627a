"""How metrics and traces are counted, carried and written.

Which metrics there are belongs to the folder that counts them.
"""
