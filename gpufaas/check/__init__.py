"""`gpufaas check`: which CUDA uses of a program the shim redirects, answers locally, or cannot do."""
