"""Compilers on this machine, and the disk cache of what they made."""
