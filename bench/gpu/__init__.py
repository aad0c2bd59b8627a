"""How fast is a real GPU beside native PyTorch, and how many models does it hold?"""
