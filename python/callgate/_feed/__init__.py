"""Host iterators that programs read from."""
