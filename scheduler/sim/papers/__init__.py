"""One folder for each paper whose figures we reproduce."""
