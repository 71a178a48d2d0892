# SPDX-License-Identifier: Apache-2.0
"""Assembles the core, in order, at the first use of a name of the package (`_attach.py`).

Wraps the functions of JAX that must be wrapped before the first trace of a gate or a tap. Parts are
loaded at their own first use (`_part.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from callgate import _callgate, _names, _part
from callgate._call import derivatives
from callgate._jax import compiling, distributed, loop_rules, remat, tracing
from callgate._loops import control, lowering, reducers, repeats
from callgate._runtime import config, lifecycle, timeline


def _with_scopes(original: Callable[..., Any], *args: Any, **params: Any) -> Any:
  """The layer for host objects in loops, which does nothing before that part is loaded."""
  scopes = sys.modules.get(_part.PARTS["scopes"][0])
  if (lower := getattr(scopes, "lower", None)) is None:
    return original(*args, **params)
  return lower(original, *args, **params)


# JAX's rules for loops, branches and reductions, with the layers around each, outermost first.
LOOP_RULES: tuple[tuple[str, Any, tuple[Callable[..., Any], ...]], ...] = (
  ("lowering", jax.lax.scan_p, (_with_scopes, lowering.lower)),
  ("lowering", jax.lax.while_p, (_with_scopes, lowering.lower)),
  ("vmap", jax.lax.cond_p, (control.batch_cond,)),
  ("vmap", jax.lax.while_p, (control.batch_while,)),
  ("linearize", jax.lax.while_p, (repeats.linearize_while,)),
  ("checkpoint", jax.lax.while_p, (repeats.checkpoint_while,)),
  ("checkpoint", jax.lax.scan_p, (repeats.checkpoint_scan,)),
  *(
    ("lowering", primitive, (functools.partial(reducers.refuse, user),))
    for primitive, user in reducers.USERS.items()
  ),
)
done = False  # True once all of this has run


def start() -> None:
  """Runs once, when this module is imported (`_attach.load`)."""
  lifecycle.start()  # hooks, fork handlers
  distributed.after_distributed_start(lambda: _part.load("processes").meet())
  _callgate.progress_set_wake(lambda: _part.load("bars").start())
  for rule, primitive, layers in LOOP_RULES:
    loop_rules.wrap(rule, primitive, *layers)
  compiling.start()
  loop_rules.wrap_hoisting(repeats.hoist)
  loop_rules.wrap_evaluation(repeats.split)
  remat.use_old_for(repeats.must_not_repeat)
  remat.keep_effects()
  tracing.refuse_forward_mode(derivatives.refuse_forward_mode)
  timeline.start()
  if config.installed():  # set by CALLGATE_INSTALL, through JAX's option
    _names.get("install")()
  _part.on("part loaded", _names.publish)
  _names.publish()


start()
done = True
