"""`gpufaas check`: which CUDA uses are redirected, answered locally, or cannot be done."""
