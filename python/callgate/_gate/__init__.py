"""Python callables in compiled programs: gates, checks, their statistics."""
