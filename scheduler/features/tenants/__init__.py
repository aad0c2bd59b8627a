"""Whose request goes next, and what an owner may use: shares, priorities and quotas."""
