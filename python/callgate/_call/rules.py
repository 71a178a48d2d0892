"""The derivative rules that a user gives a gate or kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from callgate._core.errors import GateDefinitionError

Static = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(eq=False, repr=False)
class Rules:
  """What a gate knows about its derivatives; `defined` when it has a rule for custom_jvp or vjp.

  `symbolic_zeros`: the jvp rule is told which tangents are zero, as by `jax.custom_jvp`.
  """

  gradient: str | None = None
  jvp: Callable[..., Any] | None = None
  vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None
  transpose: Callable[..., Any] | None = None
  symbolic_zeros: bool = False
  wrapped: dict[Static, Callable[..., Any]] = dataclasses.field(
    default_factory=dict[Static, Callable[..., Any]]
  )

  @property
  def defined(self) -> bool:
    return self.jvp is not None or self.vjp is not None or self.gradient is not None

  def set_jvp(self, label: str, rule: Callable[..., Any], *, symbolic_zeros: bool = False) -> None:
    """Takes a forward-mode rule; one kind of rule a gate."""
    if self.vjp is not None:
      raise GateDefinitionError(f"{label}: defjvp after defvjp; expected one of the two")
    self.jvp = rule
    self.symbolic_zeros = symbolic_zeros
    self.wrapped.clear()

  def set_vjp(self, label: str, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Takes a reverse-mode rule; one kind of rule a gate."""
    if self.jvp is not None:
      raise GateDefinitionError(f"{label}: defvjp after defjvp; expected one of the two")
    self.vjp = (fwd, bwd)
    self.wrapped.clear()
