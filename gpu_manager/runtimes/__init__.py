"""The port through which a node hosts models; one folder for each way of hosting them."""
