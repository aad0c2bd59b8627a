"""What benches measure with: reports, processes, load, nodes, comparisons; no bench itself."""
