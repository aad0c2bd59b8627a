"""Any faas-provider elsewhere: it runs the functions, we schedule, scale and proxy them."""
