"""What the encoder of graphs knows: names of functions, which draw random numbers, NumPy."""
