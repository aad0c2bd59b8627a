"""The memory that the models of one process share: on an emulated GPU a pool, accounts, limits."""
