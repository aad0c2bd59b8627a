"""What GPU time and memory were used, and by whom; pure, in whole microseconds and bytes."""
