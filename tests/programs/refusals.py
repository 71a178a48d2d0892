# SPDX-License-Identifier: Apache-2.0
"""Error messages of refusals by design; a program that raises one of them counts as correct."""

from __future__ import annotations

import re

# Part of the message, and the reason.
REFUSALS = {
  "Side-effect HLO must have sharding": "XLA refuses calls without operands on several devices",
  "side-effect HLO cannot have a replicated sharding: %io_callback": "XLA of 0.12 refuses these",
  "(?s)%slice.*Failed after spmd-partitioning": "XLA refuses slices of gathered values",
  "(?s)died: .*cannot remove instruction": "XLA of JAX 0.12 refuses ordered calls in a bare jit",
  "untyped custom call to xla.sdy": "the same for ordered calls, which XLA runs on one device",
  "non-canonical constant of type ndarray": "JAX's own rules under `vmap` refuse a NumPy constant",
  "zero-length scan is not supported in disable_jit": "JAX has no such scans",
  r"safe_zip\(\) argument 1 has length 0.*\(1, 0\)": "JAX can't export ordered calls of constants",
  "other processes don't have its function": "an exported program can't hold a tap's function",
  r"No module named 'program_\d+'": "the program's class doesn't exist in another process",
  "argument to custom_linear_solve as a JAX value": "JAX lacks linear solves' second derivatives",
  "which JAX can't export": "JAX can't export callgate's calls with `engine='jax'`",
  "serialization of host_callbacks": "JAX can't export its callbacks",
  "IO effect not supported in vmap-of-cond": "JAX refuses its callbacks in a branch under `vmap`",
  "Buffer callbacks do not support JVP": "`buffer_callback` has no JVP, also in the old interface",
  "ordered=True works in programs for one device": "`engine='jax'`, on several devices",
  "leaves some of them to XLA": "ordered calls and bars in a shard_map over some axes only",
  "slicing on sharded dims where": "JAX refuses such slices of explicitly sharded arrays",
  r"no gate or kernel named .((call:)?program_\d+\.|checkpoints )": "the other process lacks it",
  "static value of the program can't go to other processes": "an exported program can't hold them",
  "Exported programs can't call methods of such objects": "another process can't call such methods",
  "has no derivative. Define": "the call has no derivative rule",
  "axis spec None but output was batched": "under `hessian`, each lane of a feed takes an item",
  "Reverse-mode differentiation does not work for lax.while_loop": "JAX has none for such loops",
  r"JaxprTrace \d+>\.effect_handles": "JAX leaks a tracer for an effect in a loop under `hessian`",
  r"not supported in (partial-eval|AD) of `checkpoint`": "JAX's callbacks have no derivative there",
  r"incompatible devices for .* argument x of add": "JAX's operators need one device outside jit",
  "outside of the jax.shard_map in a saved loop": "devices take a feed's items at different times",
  "State effect not supported in vmap-of-cond": "JAX has no `vmap` of a branch with a Ref",
  "Cannot `vmap` ordered IO callback": "JAX has no `vmap` of ordered callbacks",
  "JAX would keep the results of every step of the loop": "threads or objects in such a loop",
  "the gate would run again for each tangent": "linearizing the while loop would repeat the effect",
}


def known(said: str) -> str:
  """The part of an error's message that is in `REFUSALS`; "" for another error."""
  return next((words for words in REFUSALS if re.search(words, said)), "")
