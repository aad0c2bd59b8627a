"""Measurements of the scheduling core; every figure in the documents comes from here."""
