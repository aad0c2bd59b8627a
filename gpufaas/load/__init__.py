"""`gpufaas load`: calls of functions at a rate or from so many clients, and what came of them."""
