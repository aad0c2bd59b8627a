"""Commands that simulate: policies compared, the thesis repeated, a recorded run replayed."""
