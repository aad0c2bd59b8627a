"""What models cost: sizes and times, declared, measured or assumed. Pure."""
