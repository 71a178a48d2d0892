"""What `jax.export` must be told about programs with gates."""

from __future__ import annotations

from typing import Any

import jax.export

from callgate import _runtime


def export_checks() -> list[Any]:
  """The safety checks to disable when exporting a program that calls gates.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np
  from jax import export

  @cg.gate(out=lambda x: x, name="export_checks.sort")
  def sort(x):
    return np.sort(x)

  exported = export.export(jax.jit(sort), disabled_checks=cg.export_checks())(jnp.ones(3))
  ```

  The exported program holds the gates' names: give `name=` to gates that are to be called in
  another process, and define them there before the program runs.
  """
  return [jax.export.DisabledSafetyCheck.custom_call(target) for target in _runtime.TARGETS]
