# SPDX-License-Identifier: Apache-2.0
"""Refuses reverse-mode derivatives of resumed loops.

A step that ran before the checkpoint does not run again, so no derivative goes through it. A
resumed loop's results go through an identity that has no transpose.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from callgate._core.errors import GateDefinitionError
from callgate._jax.tracing import Primitive

resumed_p = Primitive("resumed")


def without_transpose(tree: Any, folder: str, place: str) -> Any:
  """Returns the results of the loop at `place` that resumes from a folder's checkpoint."""

  def marked(x: Any) -> Any:
    is_real = jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
    return resumed_p.bind(x, folder=folder, place=place) if is_real else x

  return jax.tree.map(marked, tree)


def _transpose(cotangent: Any, _: Any, *, folder: str, place: str) -> Any:
  if isinstance(cotangent, ad.Zero):
    return [cotangent]
  raise GateDefinitionError(
    f"scan: save=Checkpoints({folder!r}, resume=True): expected no reverse-mode derivative, since "
    f"steps before the checkpoint don't run again, got one of the loop at {place}. Take the "
    "gradient in the loop's body (a training step), use forward mode (jax.jvp, jax.jacfwd), or "
    "pass resume=False"
  )


resumed_p.def_impl(lambda x, **_: x)
resumed_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(resumed_p, _transpose)
batching.primitive_batchers[resumed_p] = lambda args, dims, **params: (
  resumed_p.bind(*args, **params),
  dims[0],
)
mlir.register_lowering(resumed_p, lambda context, x, **_: [x])
