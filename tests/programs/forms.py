# SPDX-License-Identifier: Apache-2.0
"""Gates of one array with further options, and with arguments and results of other structures.

`FORMS` is the table: how each is defined and called, and what it gives. A gate of `calls.py` or of
this table may be called at several places of a program.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import calls
import duals
import numpy as np
from arithmetic import FUNCTIONS, Convert, a_float
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from program import Array, Context, Op, Scope, Step, Values, Writer, drawn

half = FUNCTIONS["half"][1]


def _sin_and_twice(x: Any) -> Any:
  return duals.add(duals.sin(x), duals.scaled(x, 2.0))


@dataclasses.dataclass(frozen=True)
class Form:
  """A way to define a gate.

  Attributes:
    define: text, with `{g}` for its name, `{note}` for the note of `x`, `{options}` for those
      that all gates have, `{shape}` for the operand's.
    value: what a call gives, on the oracle's values.
    twin: the same in JAX.
    call: the text of a call.
    order: how many derivatives it may stand under.
    effects: that it may have.
    notes: how many events a call is.
  """

  define: str
  value: Callable[[Any], Any]
  twin: str
  call: str = "{g}({x})"
  order: int = 2
  effects: tuple[str, ...] = ("io", "pure", "ordered")
  notes: int = 1


def _half(options: str, body: str = "return np.asarray(x * 0.5 + 0.25, x.dtype)", head: str = "x"):
  define = f"def {{g}}_host({head}):\n  {{note}}\n  {body}\n"
  define += "def {g}_twin(x):\n  return x * 0.5 + 0.25\n"
  define += f"{{g}} = cg.gate({{g}}_host, {{options}}, like={{g}}_twin{options})\n"
  return Form(define, half, "{x} * 0.5 + 0.25")


_TREES = """\
def {g}_host(tree):
  x = tree["p"]
  {note}
  return {{"a": np.asarray(np.sin(x), x.dtype), "b": (None, np.stack([x, 2 * x]))}}
def {g}_twin(tree):
  x = tree["p"]
  return {{"a": jnp.sin(x), "b": (None, jnp.stack([x, 2 * x]))}}
{g} = cg.gate({g}_host, {options}, like={g}_twin)
"""
_TREES_INPLACE = """\
def {g}_host(out, tree):
  x = tree["p"]
  {note}
  out["a"][...] = np.sin(x)
  out["b"][1][...] = np.stack([x, 2 * x])
def {g}_twin(tree):
  x = tree["p"]
  return {{"a": jnp.sin(x), "b": (None, jnp.stack([x, 2 * x]))}}
{g} = cg.gate({g}_host, {options}, like={g}_twin, style="inplace")
"""
_TREES_OUT = """\
def {g}_host(tree):
  x = tree["p"]
  {note}
  return {{"a": np.asarray(np.sin(x), x.dtype), "b": (None, np.stack([x, 2 * x]))}}
{g} = cg.gate({g}_host, {options}, out=lambda tree: {{"a": tree["p"],
  "b": (None, jax.ShapeDtypeStruct((2, *tree["p"].shape), tree["p"].dtype))}})
"""
_TREES_JVP = """
@{g}.defjvp
def {g}_rule(primals, tangents):
  (tree,), (moved,) = primals, tangents
  dx = moved["p"]
  return {g}(tree), {{"a": jnp.cos(tree["p"]) * dx, "b": (None, jnp.stack([dx, 2 * dx]))}}
"""
_TREES_VJP = """
{g}.defvjp(lambda tree: ({g}(tree), tree["p"]), lambda x, ct: (
  {{"p": jnp.cos(x) * ct["a"] + ct["b"][1][0] + 2 * ct["b"][1][1], "q": None}},))
"""
_TREE_CALL = "both({g}({{'p': {x}, 'q': None}}))"
_BOTH = 'def both(tree):\n  return tree["a"] + tree["b"][1][1]\n'
_TREE_TWIN = "jnp.sin({x}) + 2 * {x}"

_MANY = """\
def {g}_host(x):
  {note}
  return np.asarray(x * 0.5 + 0.25, x.dtype)
{g}_many = cg.gate({g}_host, {many}, out=lambda x: x, vmap="whole")
{g} = cg.gate({g}_host, {options}, out=lambda x: x)
@{g}.defvmap
def {g}_lanes(size, batched, x):
  return {g}_many(x), True
"""
_LINEAR = """\
{g} = cg.gate(lambda x: np.asarray(0.5 * x, x.dtype), {options}, out=lambda x: x, linear=True)
@{g}.deftranspose
def {g}_back(ct, x):
  return {g}(ct)
"""
_LINEAR_IN_ONE = """\
def {g}_host(x, by):
  return np.asarray(x * by, x.dtype)
{g} = cg.gate({g}_host, {options}, out=lambda x, by: x, linear=(0,))
@{g}.deftranspose
def {g}_back(ct, x, by):
  return {g}(ct, by), None
"""
_NOTHING = """\
def {g}_host(x):
  {note}
{g}_none = cg.gate({g}_host, {options})
def {g}(x):
  {g}_none(jax.lax.stop_gradient(x))
  return x
"""
_EQUAL = """\
class Equal:
  def __init__(self, by): self.by = by
  def __eq__(self, other): return isinstance(other, Equal)
  def __hash__(self): return 1
equal_1, equal_2 = Equal(1), Equal(2)
def {g}_host(x, *, by):
  note('{g}', {shape}, x, x * 0 + by.by) if {noted} else None
  return np.asarray(x + np.float32(by.by), x.dtype)
{g} = cg.gate({g}_host, {options}, like=lambda x, *, by: x + by.by)
"""
_METHOD = """\
class {g}_class:
  def __init__(self, by): self.by = by
  @cg.gate({options}, like=lambda self, x: x * 0.5 + self.by)
  def half(self, x):
    {note}
    return np.asarray(x * 0.5 + self.by, x.dtype)
{g}_object = {g}_class(np.float32(0.25))
"""
_MODULE = """\
def {g}_host(tree, x):
  {note}
  return np.asarray(tree[1](tree[0] * x), x.dtype)
{g} = cg.gate({g}_host, {options}, like=lambda tree, x: x * 0.5 + 0.25)
def {g}_add(x): return x + 0.25
"""
# Their rules call the gate of other arguments than the call that was started.
_OTHER_JVP = """
@{g}.defjvp
def {g}_rule(primals, tangents):
  (x,), (dx,) = primals, tangents
  return {g}(x), ({g}(x + 1) - {g}(x - 1)) / 2 * dx
"""
_OTHER_VJP = """
{g}.defvjp(lambda x: ({g}(x), {g}(x + 1) - {g}(x - 1)), lambda slope, ct: (slope / 2 * ct,))
"""
_HALF_OUT = """\
{g} = cg.gate(lambda x: np.asarray(x * 0.5 + 0.25, x.dtype), {options}, out=lambda x: x)
"""


def _started(rule: str) -> Form:
  return Form(
    _HALF_OUT + rule,
    half,
    "{x} * 0.5 + 0.25",
    "{g}.start({x}).result()",
    effects=("pure",),
    notes=0,
  )


_WORKER = """\
def {g}_host(x):
  if {noted}:  # in another process, whose notes come by a file
    with open(FAR, "a") as file:
      file.write(f"{g} {{x.astype(float).ravel().tolist()}}\\n")
  return np.asarray(x * 0.5 + 0.25, x.dtype)
{g} = cg.gate({g}_host, {options}, run_on="processes", like=lambda x: x * 0.5 + 0.25)
"""
_FAR = """\
import json
import tempfile
FAR = tempfile.mkstemp()[1]
def near():
  with open(FAR, "r+") as file:
    for line in file.read().splitlines():
      name, _, numbers = line.partition(" ")
      events.append((name, tuple(json.loads(numbers))))
    file.truncate(0)
settling.append(near)
"""

_INTEGERS = """\
def {g}_host(x):
  {note}
  return np.clip(np.floor(np.abs(x)), 0, 3).astype(np.int32)
def {g}_twin(x):
  return jax.lax.stop_gradient(jnp.clip(jnp.floor(jnp.abs(x)), 0, 3))
{g} = cg.gate({g}_host, {options}, cast=True, like={g}_twin)
"""

# A typed key of each lane, that goes in and comes back.
_KEYS = """\
def {g}_value(tree):
  word = jax.random.key_data(tree["k"])[1]
  return tree["p"] * 0.5 + (0.25 * word).astype(tree["p"].dtype)
def {g}_host(tree):
  x = np.asarray(tree["p"])
  {note}
  return {g}_value(tree), tree["k"]
{g}_gate = cg.gate({g}_host, {options}, like=lambda tree: ({g}_value(tree), tree["k"]),
  arrays="jax", thread="own")
def {g}(x):
  word = jnp.isfinite(x).all().astype(jnp.uint32)
  key = jax.random.wrap_key_data(jnp.stack([word, word]))
  value, key = {g}_gate({{"p": x, "k": key}})
  return value + (0 * jax.random.key_data(key)[0]).astype(value.dtype)
"""

FORMS = {
  "trees": Form(_BOTH + _TREES, _sin_and_twice, _TREE_TWIN, _TREE_CALL),
  "trees inplace": Form(_BOTH + _TREES_INPLACE, _sin_and_twice, _TREE_TWIN, _TREE_CALL),
  "trees jvp": Form(_BOTH + _TREES_OUT + _TREES_JVP, _sin_and_twice, _TREE_TWIN, _TREE_CALL),
  "trees vjp": Form(_BOTH + _TREES_OUT + _TREES_VJP, _sin_and_twice, _TREE_TWIN, _TREE_CALL),
  "one of several results": Form(
    _TREES, duals.sin, "jnp.sin({x})", "{g}({{'p': {x}, 'q': None}})['a']"
  ),
  "broadcast": _half(", vmap='broadcast'"),
  "whole": _half(", vmap='whole'"),
  "defvmap": Form(_MANY, half, "{x} * 0.5 + 0.25", order=0),
  "linear": Form(_LINEAR, lambda x: duals.scaled(x, 0.5), "0.5 * {x}", effects=("pure",), notes=0),
  "linear in one": Form(
    _LINEAR_IN_ONE,
    lambda x: duals.mul(x, duals.cos(duals.plain(x))),
    "{x} * jnp.cos(jax.lax.stop_gradient({x}))",
    "{g}({x}, jnp.cos(jax.lax.stop_gradient({x})))",
    effects=("pure",),
    notes=0,
  ),
  "differences": Form(
    "{g} = cg.gate(lambda x: np.asarray(x * 0.5 + 0.25, x.dtype), {options}, out=lambda x: x,"
    " gradient='finite-difference')\n",
    half,
    "{x} * 0.5 + 0.25",
    order=1,
    effects=("pure",),
    notes=0,
  ),
  "aliases": _half(
    ", style='inplace', aliases={{0: 0}}", "out[...] = out * 0.5 + 0.25", head="out, x"
  ),
  "buffer": _half(
    ", arrays='buffer'", "return np.asarray(np.asarray(x) * 0.5 + 0.25, np.asarray(x).dtype)"
  ),
  "jax arrays": _half(", arrays='jax', thread='own'", "return x * 0.5 + 0.25"),
  "keys": Form(_KEYS, half, "{x} * 0.5 + 0.25"),
  "copies": _half(", copy=True", "kept.append(x)\n  return np.asarray(x * 0.5 + 0.25, x.dtype)"),
  "cast": _half(", cast=True", "return x * np.float64(0.5) + np.float64(0.25)"),
  "cast of integers": Form(
    _INTEGERS,
    lambda x: Convert("int32").value(x).astype(np.float64),
    "jax.lax.stop_gradient(jnp.clip(jnp.floor(jnp.abs({x})), 0, 3))",
  ),
  "context": _half(", style='context'", "out[...] = x * 0.5 + 0.25", head="context, out, x"),
  "timeout": _half(", timeout=60"),
  "shard": _half(", sharding='shard'"),
  "no results": Form(_NOTHING, lambda x: x, "{x}", effects=("io", "ordered")),
  "equal objects": Form(
    _EQUAL,
    lambda x: duals.shifted(x, 3.0),
    "{x} + 3",
    "{g}({g}({x}, by=equal_1), by=equal_2)",
    notes=2,
  ),
  "start, a jvp of other arguments": _started(_OTHER_JVP),
  "start, a vjp of other arguments": _started(_OTHER_VJP),
  "in workers": Form(_FAR + _WORKER, half, "{x} * 0.5 + 0.25"),
  "method": Form(_METHOD, half, "{x} * 0.5 + 0.25", "{g}_object.half({x})"),
  "functions in arguments": Form(
    _MODULE, half, "{x} * 0.5 + 0.25", "{g}((jnp.full((), 0.5), {g}_add, 'text', None), {x})"
  ),
}


@dataclasses.dataclass(frozen=True)
class FormCall(Op):
  """A call of a gate of `FORMS`."""

  name: str
  kind: str
  effect: str
  type: Array
  order: int

  @property
  def part(self) -> str:  # type: ignore[override]
    return f"{self.kind}{'' if self.effect == 'pure' else ' ' + self.effect}"

  def write(self, writer: Writer, step: Step) -> None:
    form, x = FORMS[self.kind], step.operands[0].name
    if writer.twin:
      writer.assign(step, form.twin.format(x=x))
      return
    noted = self.effect != "pure"
    if "kept" in form.define:
      writer.above("kept = []")
    define = form.define
    for shared in (_BOTH, _FAR):
      if define.startswith(shared):
        writer.above(shared)
        define = define.removeprefix(shared)
    writer.above(
      define.format(
        g=self.name,
        note=f"note('{self.name}', {self.type.shape}, x)" if noted else "pass",
        noted=noted,
        shape=self.type.shape,
        options=f"name=NAMES + '{self.name}', effect='{self.effect}'",
        many=f"name=NAMES + '{self.name}_many', effect='{self.effect}'",
      )
    )
    writer.assign(step, form.call.format(g=self.name, x=x))

  def fits(self, context: Context) -> bool:
    """True if a call may stand there."""
    return context.order <= self.order and not (context.forward and " vjp" in self.kind)

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    if self.effect != "pure":
      if self.kind == "equal objects":
        zeros = 0 * duals.plain(x)
        machine.note(lane, self.name, x, zeros + 1)
        machine.note(lane, self.name, duals.shifted(x, 1.0), zeros + 2)
      elif FORMS[self.kind].notes:
        machine.note(lane, self.name, x)
    return [FORMS[self.kind].value(x)]


def _one_of(kinds: Sequence[str], scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  kind = scope.draw(st.sampled_from(kinds))
  effect = scope.draw(st.sampled_from(FORMS[kind].effects))
  op = FormCall(scope.name("gate"), kind, effect, var.type, FORMS[kind].order)
  if op.fits(context):
    scope.add(op, [var], var.type)
    scope.gates.append(op)
  return True


RULED = [kind for kind in FORMS if re.search("jvp|vjp|linear|differences", kind)]
NOT_RULED = [kind for kind in FORMS if kind not in RULED]


@drawn("part")
@drawn("part")
def form(scope: Scope, context: Context) -> bool:
  return _one_of(NOT_RULED, scope, context)


@drawn("part")
def ruled(scope: Scope, context: Context) -> bool:
  """A gate with a derivative of its own. Some are like all others where there is none."""
  plain = [kind for kind in RULED if not re.search("differences|other arguments", kind)]
  return _one_of(RULED if context.order else plain, scope, context)


@drawn("part")
def again(scope: Scope, context: Context) -> bool:
  """Another call of a gate that the program has called before."""
  of = lambda op: scope.of(lambda type_: type_ == op.type)
  gates = [op for op in scope.gates if op.fits(context) and of(op)]
  if not gates:
    return False
  op = scope.pick_of(gates)
  operands = [scope.pick(of(op)) for _ in range(2 if isinstance(op, calls.Call) and op.two else 1)]
  scope.add(op, operands, op.type)
  return True
