"""A model's way down the stages of its exit, through a whole stack with emulated GPUs."""
