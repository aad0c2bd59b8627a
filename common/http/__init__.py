"""HTTP pieces that our servers and clients share.

No route and no status of one folder belongs here.
"""
