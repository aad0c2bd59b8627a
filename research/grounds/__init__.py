"""The loads for which special policies were made, and every policy on all of them. Pure."""
