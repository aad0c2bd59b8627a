"""The gateway: implements OpenFaaS's API, and finds an instance and a GPU for each call."""
