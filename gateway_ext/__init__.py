"""The gateway: speaks OpenFaaS, finds each call a function instance and, if need be, a GPU."""
