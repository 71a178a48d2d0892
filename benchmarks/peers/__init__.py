"""The contestants: one adapter per way of calling host code from a compiled JAX program."""
