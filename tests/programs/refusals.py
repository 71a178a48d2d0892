# SPDX-License-Identifier: Apache-2.0
"""The words of refusals by design: a program that is refused by one of them is right."""

from __future__ import annotations

import re

# The words, and why.
REFUSALS = {
  "Side-effect HLO must have sharding": "XLA's, of calls without operands over devices",
  "(?s)%slice.*Failed after spmd-partitioning": "XLA's, of a slice of what is gathered elsewhere",
  "(?s)died: .*cannot remove instruction": "XLA's of 0.12, of ordered calls in a bare jit",
  "untyped custom call to xla.sdy": "as above, of ordered ones: XLA runs them on one device",
  "non-canonical constant of type ndarray": "JAX's own rules under `vmap`, of a NumPy constant",
  "zero-length scan is not supported in disable_jit": "JAX's own",
  "other processes don't have its function": "a tap's function in an exported program",
  r"No module named 'program_\d+'": "a class of the program in another process",
  "argument to custom_linear_solve as a JAX value": "JAX's second derivatives of linear solves",
  "which JAX exports in no": "callgate's own by JAX's callbacks, in an exported program",
  "serialization of host_callbacks": "JAX's callbacks in an exported program",
  "IO effect not supported in vmap-of-cond": "JAX's callbacks in a branch under vmap",
  "Buffer callbacks do not support JVP": "JAX's, in the old interface, too",
  "ordered=True works in programs for one device": "an ordered tap beside a shard_map, by JAX",
  "leaves some of them to XLA": "what is ordered or has a bar, in a shard_map over some axes",
  "slicing on sharded dims where": "JAX's, of explicitly sharded arrays, in what twins leave out",
  r"no gate or kernel named .((call:)?program_\d+\.|checkpoints )": "elsewhere, calls without one",
  "static value of the program can't go to other processes": "objects in an exported program",
  "can't call methods of objects that are no pytrees": "such methods in another process",
  "has no derivative. Define": "a call without a derivative under `grad`",
  "axis spec None but output was batched": "a feed under `hessian`, whose lanes take an item each",
  "Reverse-mode differentiation does not work for lax.while_loop": "JAX's own, under `grad`",
  r"JaxprTrace \d+>\.effect_handles": "JAX's, of an effect in a loop under `hessian`: a leak",
  "Cannot `vmap` ordered IO callback": "JAX's ordered callbacks under `vmap`",
  "JAX would keep the results of the loop's every step": "threads and objects in such a loop",
  "the gate would run again for each tangent": "an effect in a while loop that is linearized",
}


def known(said: str) -> str:
  """The words that an error has in common with a refusal; "" for another error."""
  return next((words for words in REFUSALS if re.search(words, said)), "")
