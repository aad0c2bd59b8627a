"""Read-only views of a leader's state for people: reports, explanations, the page's feed."""
