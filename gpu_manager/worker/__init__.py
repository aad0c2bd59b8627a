"""What runs in a model's own process: it maps the weights, builds programs and runs them."""
