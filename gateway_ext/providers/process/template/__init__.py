"""Templates of functions, as the gateway sees them: started, ordered to fork, bounded, ended."""
