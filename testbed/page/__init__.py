"""The web page over a generated cluster, and a browser that looks at the page."""
