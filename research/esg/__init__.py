"""ESG's evaluation: workflows on 16 simulated nodes under five schedulers, and under our own."""
