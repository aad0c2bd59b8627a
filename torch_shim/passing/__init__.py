"""Handles that leave this process: in files and pickles, and to other processes."""
