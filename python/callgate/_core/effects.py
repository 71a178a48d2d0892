# SPDX-License-Identifier: Apache-2.0
"""The JAX effects of gates, taps, handles, buffer callbacks and progress bars."""

from __future__ import annotations

from callgate._jax import tracing


class _Effect(tracing.Effect):
  """An effect; all objects of a class are equal."""

  def __str__(self) -> str:
    return type(self).__name__.removesuffix("Effect")

  def __eq__(self, other: object) -> bool:
    return type(self) is type(other)

  def __hash__(self) -> int:
    return hash(type(self))


class GateEffect(_Effect):
  """Keeps an io gate alive: it runs once per execution, in no particular order."""


class TapEffect(GateEffect):
  """Keeps a tap alive. Unlike a gate it may run twice, because the repeat is marked."""


class WholeTapEffect(TapEffect):
  """Keeps taps of all lanes at once (`TapSite.whole`) alive and in program order.

  Under vmap JAX handles their control flow, as in `callgate.compat.host_callback_2023`.
  """


class OrderedGateEffect(GateEffect):
  """Keeps ordered gates and taps alive and in program order, also across calls of the program."""


class HandleEffect(_Effect):
  """Makes the dispatch track programs that make or use host objects, and calls for one thread.

  Transformation rules treat a call with this effect as pure.
  """


class WaitEffect(HandleEffect):
  """Marks waits for started calls: lanes that take different branches wait separately."""


class BufferCallbackEffect(_Effect):
  """Keeps a call of `callgate.compat.buffer_callback` with unused results."""


GATE_EFFECT = GateEffect()
TAP_EFFECT = TapEffect()
WHOLE_TAP_EFFECT = WholeTapEffect()
ORDERED_GATE_EFFECT = OrderedGateEffect()
HANDLE_EFFECT = HandleEffect()
WAIT_EFFECT = WaitEffect()


class ProgressEffect(_Effect):
  """Keeps a loop's bar alive, and out of recomputed passes. The dispatch ignores it."""


PROGRESS_EFFECT = ProgressEffect()


def allow() -> None:
  """Allows these effects in JAX's programs; called once by `import callgate`."""
  for kind in (GateEffect, TapEffect, OrderedGateEffect):
    tracing.allow_effect(kind, ordered=kind is OrderedGateEffect, kept=True)
  tracing.allow_effect(WholeTapEffect, ordered=True)
  tracing.allow_effect(ProgressEffect, ordered=False, kept=True)
  for kind in (HandleEffect, WaitEffect, BufferCallbackEffect):
    tracing.allow_effect(kind, ordered=False)
