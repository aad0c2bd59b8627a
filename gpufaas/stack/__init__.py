"""All parts on one machine: what `gpufaas up` runs, and where it keeps its files."""
