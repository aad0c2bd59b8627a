"""User ids of functions and of builds: held by one gateway at a time, and emptied of processes."""
