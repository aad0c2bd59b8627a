"""What a client may do again when it does not know whether an order was carried out."""

# Given twice, a prefetch may load a second copy, and an evict is refused: it was carried out.
GIVEN_ONCE = frozenset({"prefetch", "evict"})
