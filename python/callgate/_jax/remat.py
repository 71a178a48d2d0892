# SPDX-License-Identifier: Apache-2.0
"""`jax.checkpoint`: its new implementation (`jax_remat3`), and effects in unused parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src.interpreters import partial_eval as _partial_eval


def use_old_for(holds: Callable[[Any], bool]) -> None:
  """Uses the implementation without `jax_remat3` for programs for which `holds(closed jaxpr)`.

  The new one runs all of a program again in the backward pass, whatever its effects, and has no
  rule that keeps a primitive's results. (In 0.10 to 0.12 it is off by default; the old one has
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


def keep_effects() -> None:
  """Makes dead-code elimination keep a `jax.checkpoint` with an effect and constant operands.

  JAX's own rule drops it if neither an operand nor a result is used (0.10 and 0.11).
  """
  rules: dict[Any, Callable[..., Any]] = _partial_eval.dce_rules
  rule = rules[_ad_checkpoint.remat_p]

  def keeping(used: Sequence[bool], *live_and_eqn: Any) -> Any:
    used_inputs, kept = rule(used, *live_and_eqn)
    eqn = live_and_eqn[-1]
    if kept is None and eqn.effects:
      return [True] * len(eqn.invars), eqn
    return used_inputs, kept

  rules[_ad_checkpoint.remat_p] = keeping
