"""OpenFaaS's API: its routes, its JSON, its notations for sizes and times."""
