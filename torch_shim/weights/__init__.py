"""A model's weights: laid out as the node's image, named by their content."""
