"""A model's weights: laid out as an image for the node, and named by a digest of the content."""
