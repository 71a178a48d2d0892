# SPDX-License-Identifier: Apache-2.0
"""The JAX effects of gates, taps, handles, buffer callbacks and progress bars."""

from __future__ import annotations

from callgate._jax import tracing


class _Effect(tracing.Effect):
  """One of a class is as good as another."""

  def __str__(self) -> str:
    return type(self).__name__.removesuffix("Effect")

  def __eq__(self, other: object) -> bool:
    return type(self) is type(other)

  def __hash__(self) -> int:
    return hash(type(self))


class GateEffect(_Effect):
  """Keeps an io gate alive: it runs once per execution, in no particular order."""


class TapEffect(GateEffect):
  """Keeps a tap alive. It may run twice where a gate must not: a repeat is marked as one."""


class WholeTapEffect(TapEffect):
  """Keeps taps of all lanes at once (`TapSite.whole`) alive and in program order.

  Under vmap their control flow is left to JAX, as in `callgate.compat.host_callback_2023`.
  """


class OrderedGateEffect(GateEffect):
  """Keeps ordered gates and taps alive and in program order, also across calls of the program."""


class HandleEffect(_Effect):
  """Has the dispatch know of programs that make or use objects of the host: when they have ended.

  Likewise of those with calls for one thread.

  Rules of transformation treat what has it as a pure call.
  """


class WaitEffect(HandleEffect):
  """Marks waits for started calls: where lanes go apart, each waits in its own branch alone."""


class BufferCallbackEffect(_Effect):
  """Keeps a call of `callgate.compat.buffer_callback` whose results are not used."""


GATE_EFFECT = GateEffect()
TAP_EFFECT = TapEffect()
WHOLE_TAP_EFFECT = WholeTapEffect()
ORDERED_GATE_EFFECT = OrderedGateEffect()
HANDLE_EFFECT = HandleEffect()
WAIT_EFFECT = WaitEffect()


class ProgressEffect(_Effect):
  """Keeps a loop's bar alive, and out of recomputed passes. Programs' dispatch doesn't see it."""


PROGRESS_EFFECT = ProgressEffect()


def allow() -> None:
  """Has JAX take programs with these effects; called once by `import callgate`."""
  for kind in (GateEffect, TapEffect, OrderedGateEffect):
    tracing.allow_effect(kind, ordered=kind is OrderedGateEffect, kept=True)
  tracing.allow_effect(WholeTapEffect, ordered=True)
  tracing.allow_effect(ProgressEffect, ordered=False, kept=True)
  for kind in (HandleEffect, WaitEffect, BufferCallbackEffect):
    tracing.allow_effect(kind, ordered=False)
