"""The JAX effects of gates, taps and progress bars."""

from __future__ import annotations

from callgate._jax import tracing


class GateEffect(tracing.Effect):
  """Keeps an io gate alive: it runs once per execution, in no particular order."""

  __str__ = lambda self: "Gate"  # noqa: E731 - JAX's effects are written so

  def __eq__(self, other: object) -> bool:
    return type(self) is type(other)

  def __hash__(self) -> int:
    return hash(type(self))


class TapEffect(GateEffect):
  """Keeps a tap alive. It may run twice where a gate must not: a repeat is marked as one."""

  __str__ = lambda self: "Tap"  # noqa: E731


class WholeTapEffect(TapEffect):
  """Keeps taps of all lanes at once (`TapSite.whole`) alive and in program order.

  Under vmap their control flow is left to JAX, as in `callgate.compat.host_callback_2023`.
  """

  __str__ = lambda self: "WholeTap"  # noqa: E731


class OrderedGateEffect(GateEffect):
  """Keeps ordered gates and taps alive and in program order, also across calls of the program."""

  __str__ = lambda self: "OrderedGate"  # noqa: E731


GATE_EFFECT = GateEffect()
TAP_EFFECT = TapEffect()
WHOLE_TAP_EFFECT = WholeTapEffect()
ORDERED_GATE_EFFECT = OrderedGateEffect()


class ProgressEffect(tracing.Effect):
  """Keeps a loop's bar alive, and out of recomputed passes. Programs' dispatch doesn't see it."""

  __str__ = lambda self: "Progress"  # noqa: E731 - JAX's effects are written so

  def __eq__(self, other: object) -> bool:
    return type(self) is type(other)

  def __hash__(self) -> int:
    return hash(type(self))


PROGRESS_EFFECT = ProgressEffect()
