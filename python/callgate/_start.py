# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together, in order, when the first of them is needed (`_attach.py`).

What is below and has to reach up gets it handed down here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from callgate import _names, _part
from callgate._breakpoint import breakpoint
from callgate._call import derivatives
from callgate._checkpoints import checkpoints
from callgate._feed import ending
from callgate._futures import job, ticket
from callgate._gate import check, gate
from callgate._jax import loop_rules, remat, tracing
from callgate._loops import control, draw, lowering, progress
from callgate._objects import collect, scopes, table
from callgate._process import group
from callgate._runtime import lifecycle, timeline
from callgate._steer import record, stop
from callgate._tap import channel, delivery, print, target
from callgate._workers import threads, workers
from callgate.compat._callbacks import install

# JAX's rules for loops and branches, with the layers around each, the outermost first.
LOOP_RULES: tuple[tuple[str, Any, tuple[Callable[..., Any], ...]], ...] = (
  ("lowering", jax.lax.scan_p, (scopes.lower, lowering.lower)),
  ("lowering", jax.lax.while_p, (scopes.lower, lowering.lower)),
  ("vmap", jax.lax.cond_p, (control.batch_cond,)),
  ("vmap", jax.lax.while_p, (control.batch_while,)),
  ("linearize", jax.lax.while_p, (control.linearize_while,)),
  ("checkpoint", jax.lax.while_p, (lowering.checkpoint_while, control.checkpoint_while)),
  ("checkpoint", jax.lax.scan_p, (control.checkpoint_scan,)),
)

# In the order in which they settle and end.
PARTS: tuple[type[_part.Part], ...] = (
  job.StartedCalls,  # whose errors the end of the channels raises
  group.Processes,
  draw.Bars,
  checkpoints.Writers,
  channel.Channels,
  threads.Threads,
  workers.Pools,
  ending.Feeds,
  collect.Objects,
  check.Checks,
  breakpoint.Breakpoints,
  scopes.Scopes,
  stop.Stops,
  print.Prints,
  target.Taps,
)
done = False  # True once all of this has run


def start() -> None:
  """Called once, when this module is imported (`_attach.load`)."""
  lifecycle.start()  # hooks, handlers of forks
  for part in PARTS:
    _part.join(part())
  group.start()
  draw.start()
  delivery.listen(progress.note)
  _part.on("knob changed", record.record)
  gate.futures += [ticket.start, ticket.result]
  _part.on("effects barrier", job.after_effects_barrier)
  _part.on("object made", collect.due)
  _part.on("object dropped", table.drop)
  _part.on("thread ends", table.end_of)
  tracing.clear_with_caches(delivery.pins, "what callgate's records name")
  for rule, primitive, layers in LOOP_RULES:
    loop_rules.wrap(rule, primitive, *layers)
  loop_rules.wrap_hoisting(control.hoist)
  loop_rules.wrap_evaluation(control.split)
  remat.use_old_for(control.must_not_repeat)
  tracing.refuse_forward_mode(derivatives.refuse_forward_mode)
  timeline.start()
  install.start()
  _names.publish()


start()
done = True
