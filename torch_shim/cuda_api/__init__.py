"""What torch.cuda answers about the redirected GPU."""
