"""What callgate takes from JAX's private modules; nothing else imports `jax._src`."""
