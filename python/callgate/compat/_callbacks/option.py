"""Whether JAX's own callbacks run on callgate's engine: an option of the process."""

from __future__ import annotations

from typing import Any

from callgate._jax import tracing

_everywhere: Any = tracing.define_bool(
  "callgate_install",
  False,
  "Run jax.pure_callback, io_callback and debug.callback on callgate's engine (callgate.install).",
)


def switch(on: bool) -> None:
  """For what is traced from now on."""
  tracing.update_option("callgate_install", on)


def installed() -> bool:
  """Whether `install` is in effect for what is traced now."""
  return bool(_everywhere.value)
