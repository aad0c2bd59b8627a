"""`gpufaas top`: the page at a terminal."""
