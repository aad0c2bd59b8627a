"""Data that functions pass to each other, as a worker has it: put, taken, lent and borrowed."""
