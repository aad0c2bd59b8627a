"""How long the first answer takes of a function that has no instance, or one instance too few."""
