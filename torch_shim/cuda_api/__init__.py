"""The replacements of torch.cuda's functions and classes."""
