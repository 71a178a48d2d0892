"""JAX's own callbacks on callgate's engine."""
