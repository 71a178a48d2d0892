# SPDX-License-Identifier: Apache-2.0
"""Functions that were jitted before `import callgate`, and copies, are like those jitted later."""

from __future__ import annotations

import json
from typing import Any

import interpreters
import pytest

# Each program calls the gate of a box that is filled after the import. Kinds of errors, and whether
# the runtime knew of the call, are printed as JSON.
SCRIPT = """
import copy, functools, gc, json, sys
import jax, numpy as np

box = {}

def call(x):
  return box["gate"](x) if box else x

def late(x):
  return call(x)

class Holder:
  program = staticmethod(jax.jit(lambda x: call(x)))

def closed():
  inner = jax.jit(lambda x: call(x))
  return lambda x: inner(x)

mapped = jax.pmap(lambda x: call(x))
programs = {
  "jit": jax.jit(lambda x: call(x)),
  "partial": functools.partial(jax.jit, static_argnums=1)(lambda x, n: call(x)),
  "in a class": Holder.program,
  "in a closure": closed(),
  "that has run": jax.jit(lambda x: call(x)),
  "pmap": lambda x: mapped(x[None]),
  "remat": jax.jit(jax.checkpoint(lambda x: call(x))),
}
programs["partial"] = functools.partial(programs["partial"], n=3)
programs["that has run"](np.float32(1))
gc.collect()
if sys.argv[1] == "frozen":
  gc.freeze()
jit = jax.jit
if sys.argv[1] == "jit replaced":  # as type checkers do
  jax.jit = lambda function, **options: functools.partial(jit(function, **options))

import callgate as cg
from callgate import _callgate

@cg.gate(out=lambda x: x, effect="io")
def gate(x):
  underway.add(_callgate.oldest_underway(False) < 2**64 - 1)
  if np.any(x < 0):
    raise KeyError("no")
  return x

jax.jit = jit
programs["jitted later"] = jax.jit(late)
programs["a copy"] = copy.deepcopy(programs["jitted later"])
box["gate"] = gate
jax.clear_caches()
found = {}
for name, program in programs.items():
  kinds, underway = set(), set()
  jax.block_until_ready(program(np.float32(1)))
  underway.clear()
  for sign in (1, -1, -1, -1):
    try:
      jax.block_until_ready(program(np.float32(sign)))
    except Exception as error:
      kinds.add(type(error).__name__)
  found[name] = sorted(kinds), sorted(underway)
print(json.dumps(found))
"""


@pytest.mark.parametrize("state", ["usual", "frozen", "jit replaced"])
def test_functions_jitted_before_the_import_raise_and_hold_like_others(state: str) -> None:
  found: dict[str, Any] = json.loads(interpreters.succeed(SCRIPT, state))
  assert len(found) == 9
  assert found == {name: [["JaxRuntimeError"], [True]] for name in found}
