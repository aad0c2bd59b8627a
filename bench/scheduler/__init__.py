"""How many leases a second does the scheduler give over HTTP?"""
