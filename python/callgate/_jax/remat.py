# SPDX-License-Identifier: Apache-2.0
"""`jax.checkpoint`: its new implementation (`jax_remat3`), for programs that it would repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import ad_checkpoint as _ad_checkpoint


def use_old_for(holds: Callable[[Any], bool]) -> None:
  """Has programs for which `holds(closed jaxpr)` take the implementation without `jax_remat3`.

  The new one runs all of a program again in the backward pass, whatever its effects, and knows no
  rule by which a primitive's results are kept. (In 0.10 to 0.12, off by default; the old one has
  rules, `partial_eval_jaxpr_custom_rules`.)
  """
  new: Any = getattr(_ad_checkpoint, "RematTraced", None)
  if new is None:
    return
  call: Callable[..., Any] = new.__call__

  def call_either(self: Any, *args: Any) -> Any:
    if not holds(self.jaxpr):
      return call(self, *args)
    return _ad_checkpoint.remat_p.bind(
      *args, jaxpr=getattr(self.jaxpr, "jaxpr", self.jaxpr), policy=self.policy,
      prevent_cse=getattr(self, "prevent_cse", True), differentiated=False,
    )  # fmt: skip

  new.__call__ = call_either
