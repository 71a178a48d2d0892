"""Streams of records in files and on sockets, read back."""
