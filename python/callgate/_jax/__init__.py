"""Takes what callgate needs from JAX's private modules; nothing else imports `jax._src`."""
