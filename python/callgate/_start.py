# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together, in order, when the first of them is needed (`_attach.py`).

What is below and has to reach up gets it handed down here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from callgate import _names
from callgate._breakpoint import breakpoint
from callgate._call import derivatives
from callgate._checkpoints import checkpoints
from callgate._core import registry
from callgate._feed import ending
from callgate._futures import job, ticket
from callgate._gate import check, gate
from callgate._jax import dispatch, loop_rules, remat, tracing
from callgate._loops import control, draw, lowering, progress
from callgate._objects import collect, scopes, table
from callgate._process import group
from callgate._runtime import barrier, lifecycle, timeline
from callgate._steer import knob, record, stop
from callgate._tap import channel, delivery, print, target
from callgate._workers import objects, threads, workers
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

done = False  # True once all of this has run


def start() -> None:
  """Called once, when this module is imported (`_attach.load`)."""
  lifecycle.start()  # dtypes, hooks, handlers of forks
  lifecycle.at_end("hurry", ending.limit_all)
  lifecycle.at_end("leave", group.leave)
  lifecycle.at_end("draw", draw.stop)
  lifecycle.at_end("deliver", job.finish)  # whose errors the next one raises
  lifecycle.at_end("deliver", checkpoints.finish)
  lifecycle.at_end("deliver", channel.close_all)
  lifecycle.at_end("deliver", threads.end_all)
  lifecycle.at_end("join", ending.close_all)
  lifecycle.at_end("join", workers.close_all)
  group.start()
  draw.start()
  delivery.listen(progress.note)
  knob.changed.append(record.record)
  gate.futures += [ticket.start, ticket.result]
  barrier.waits["started calls"] = job.settle
  dispatch.after_effects_barrier.append(job.after_effects_barrier)
  lifecycle.at_end("join", job.close)
  os.register_at_fork(after_in_child=job.after_fork)
  table.added.append(collect.due)
  objects.drops.append(table.drop)
  threads.ends.append(table.end_of)
  barrier.at_barrier.append(collect.at_barrier)
  registry.finders += [check.find, breakpoint.find, scopes.find, stop.find]
  registry.finders += [print.find, target.find]
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
