"""Decides which dimensions of a call may stay split, and answers XLA's partitioner."""
