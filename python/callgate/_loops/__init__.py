"""JAX's control flow around gates, taps and progress bars."""
