"""The live page of `python -m callgate watch`."""
