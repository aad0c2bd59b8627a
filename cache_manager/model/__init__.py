"""Ids, sizes, tiers and errors: the vocabulary that every part of gpufaas shares. Pure."""
