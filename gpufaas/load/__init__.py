"""`gpufaas load`: calls functions at a rate or from several clients, and reports results."""
