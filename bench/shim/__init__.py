"""What do calls through the shim, loads and starts cost beside native PyTorch?"""
