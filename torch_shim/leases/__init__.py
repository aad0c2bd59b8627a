"""Which lease a request has, with which GPU manager, and when it is given back."""
