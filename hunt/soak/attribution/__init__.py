"""What the memory of a running part consists of: said by the part itself, from a thread of it."""
