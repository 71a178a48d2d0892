# SPDX-License-Identifier: Apache-2.0
"""Ways for programs with some parts, and for all others."""

from __future__ import annotations

from collections.abc import Sequence

import asked
import checks
import loops
import parts
from calls import Call
from forms import FormCall
from in_order import InOrder
from program import Op, Program

_ANOTHER_ORDER = """
import tempfile
path = os.path.join(tempfile.mkdtemp(), "recording")
others = [np.float32(1) - x for x in inputs]
run = jax.jit(program)
with cg.record(path):
  execute(1, lambda: [run(*inputs)])
  live = jax.block_until_ready(run(*others))
with cg.replay(path):
  again = [jax.block_until_ready(run(*xs)) for xs in (others, inputs)]
  settled()
for a, b in zip([*live, *calls[-1][0][0]], [*again[0], *again[1]]):
  np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
execute(1, lambda: [run(*inputs)])
"""

# With other values in its knobs a program gives what a new one gives, which has had no others.
_KNOBS = """
knobs = [value for name, value in list(globals().items()) if name.startswith("knob")]
run = jax.jit(program)
execute(1, lambda: [run(*inputs)])
for number in (2.0, -1.0):
  for knob in knobs:
    knob.set(number)
  old = jax.block_until_ready(run(*inputs))
  new = jax.block_until_ready(jax.jit(lambda *xs: program(*xs))(*inputs))
  settled()
  for a, b in zip(old, new):
    np.testing.assert_allclose(*(np.asarray(x).astype(complex) for x in (a, b)), 2e-3, 2e-3)
for knob in knobs:
  knob.set(0.5)
execute(1, lambda: [run(*inputs)])
"""

# Bars of all loops change nothing, and are gone behind their block.
_BARS = """
run = jax.jit(program)
execute(1, lambda: [run(*inputs)])
with cg.bars(min_steps=0):
  execute(2, lambda: [run(*inputs), run(*inputs)])
execute(1, lambda: [run(*inputs)])
"""

FURTHER = {
  **checks.WAYS,
  **asked.WAYS,
  "bars": _BARS,
  "knobs set": _KNOBS,
  "recorded, replayed in another order": _ANOTHER_ORDER,
}
# An execution that ends early, or beside another one, leaves a feed or a counter anywhere. Without
# jit a traced loop is unrolled, and each step's call counts for itself.
_NOT_COUNTED = (
  *("two threads", "two programs at once", "threads in a hurry", "an error", "an error later"),
  *("an error without jit", "interrupted", "replicated", "explicit mesh", "shard_map around"),
  *("partial shard_map around", "sharded", "uneven", "explicitly sharded", "knobs set"),
  "disable_jit",
  asked.FIND_NAN,
  *checks.WAYS,
)


def _replays_in_order(op: Op) -> bool:
  """True if a replay answers its calls in the order of the recording alone.

  Objects that are made of the same arguments are told apart by their order.
  """
  kinds = parts.Feed, parts.Stop, parts.Hold, loops.Handles
  ordered = isinstance(op, (Call, FormCall)) and op.effect == "ordered"
  ordered = ordered or (isinstance(op, InOrder) and op.kind == "gate ordered")
  return ordered or isinstance(op, kinds)


def fitting(ways: Sequence[str], program: Program) -> list[str]:
  """The ways of these in which the program's parts can run."""
  ops = list(program.body.ops())
  is_checked = any(isinstance(op, checks.Decided) for op in ops)
  has_nan = any(isinstance(op, asked.MaybeNan) for op in ops)
  found = [way for way in ways if (way in checks.WAYS) == is_checked]
  found = [way for way in found if (way == asked.FIND_NAN) == has_nan]
  if any(op.transformation == "jit inline" for op in ops):  # JAX 0.10 drops the lines in it
    found = [way for way in found if way != asked.FIND_NAN]
  if asked.verified(program) is None:
    found = [way for way in found if way != asked.VERIFIED]
  if any(op.counts for op in ops):
    found = [way for way in found if way not in _NOT_COUNTED]
  if any(op.refuses for op in ops):
    found = [way for way in found if way not in ("vmap around", "grad around")]
  if any(op.part.startswith("id_tap") for op in ops):  # they run again in a `checkpoint`
    found = [way for way in found if way != "grad around"]
  if not any(isinstance(op, parts.Knob) for op in ops):
    found = [way for way in found if way != "knobs set"]
  if any(op.counts or _replays_in_order(op) for op in ops):
    found = [way for way in found if way != "recorded, replayed in another order"]
  return found
