"""What GPU time and memory were used, and by whom, in whole microseconds and bytes; the bill."""
