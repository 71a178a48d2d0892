"""PyTorch functions and modules in compiled programs."""
