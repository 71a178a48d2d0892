# SPDX-License-Identifier: Apache-2.0
"""Advice that makes a call faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from callgate._explain.call import ExplainedCall
from callgate._runtime import config

_LARGE = 64 << 10  # bytes: smaller copies get no advice
_MANY = 16  # lanes


def of(call: ExplainedCall, gate: Any) -> Iterator[str]:
  """Yields advice for a call; `gate` is its gate or kernel, its tap site, or JAX's primitive."""
  if call.kind == "JAX callback":
    yield from _of_callback(call)
  elif call.kind == "tap":
    if call.copies >= _LARGE and call.loops and gate.every == 1:
      yield f"every= sends fewer of these {call.copies} bytes; a smaller value copies less"
  else:
    yield from _of_gate(call, gate)
  if call.gathers:
    yield (
      f"{call.gathers} bytes are gathered for it on each device: sharding= says which dimensions "
      "may stay split"
    )


def _of_callback(call: ExplainedCall) -> Iterator[str]:
  if not config.installed():
    yield "callgate.install() runs it on callgate's engine; a gate is quicker still"
  elif not call.source:
    yield "a gate in its place is quicker"


def _of_gate(call: ExplainedCall, gate: Any) -> Iterator[str]:
  native = call.kind == "kernel"
  if call.lanes >= _MANY and not native and call.gil:
    yield (
      f"{call.lanes} lanes are called one after another: vmap='whole' calls once, with all of "
      "them; run_on='processes' runs them at once"
    )
  if call.lanes >= _MANY and native and not getattr(gate, "thread_safe", True):
    yield "thread_safe=True lets lanes run on all of XLA's threads"
  if not native and call.gil and gate.style == "return" and call.copies >= _LARGE:
    yield "style='inplace' writes results where they belong, without a copy"
  if getattr(gate, "timeout", 0):
    yield "timeout= makes private copies of the arguments"
  elif getattr(gate, "copy", False):
    yield "copy=True makes private copies of the arguments"
  if call.effect == "ordered":
    yield "effect='io' leaves the order to XLA, which then waits less"
  if config.engine() == "jax":
    yield "config(engine='callgate') doesn't go through JAX's own callbacks"
