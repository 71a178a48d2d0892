# SPDX-License-Identifier: Apache-2.0
"""Loops whose body has nothing to do any more from some step on, and that end there.

Such a body takes a flag with each step and leaves the carry as it is, and its ys zeros, where the
flag is false. That alone is right under every transformation of JAX's, but walks through all steps.
So the body marks what it carries and returns by `while_going`, which is the identity; where a loop
is lowered, a mark at the top of its body tells which flag that is. The loop then ends with the
flag's first False. In the loops that JAX makes for derivatives the flags come step by step, as what
the loop before has kept; they may begin with False, where the loop runs backwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from callgate._jax import loops, walk
from callgate._jax.tracing import Primitive, jaxpr_as_fun

going_p = Primitive("while_going")


def while_going(going: Any, count: Any, values: Any) -> tuple[Any, Any]:
  """The count of steps and the values as they are, marked: they change while `going` alone.

  Marked are the count, if there is one, and what has derivatives, for the loops of those.
  """
  if count is not None:
    count = going_p.bind(going, count, counts=True)

  def marked(x: Any) -> Any:
    return going_p.bind(going, x, counts=False) if jnp.issubdtype(x.dtype, jnp.inexact) else x

  return count, jax.tree.map(lambda x: marked(jnp.asarray(x)) if jax.typeof(x) else x, values)


@dataclasses.dataclass(frozen=True)
class Going:
  """Where a loop's body has its flag: among the carry, or else among what is scanned over.

  Attributes:
    flag: its place there.
    count: the place of the count of steps in the carry; None where the body doesn't count.
  """

  carried: bool
  flag: int
  count: int | None = None


def going_of(closed: Any, consts: int, carry: int) -> Going | None:
  """The flag of a body with so many constants and so much of a carry; None without."""
  places = {variable: place - consts for place, variable in enumerate(closed.jaxpr.invars)}
  found: Going | None = None
  for flag, value, counts in _marks(closed.jaxpr, places):
    if flag < 0:
      continue
    carried = flag < carry
    count = value if counts and 0 <= value < carry else None
    if found is None or count is not None:
      found = Going(carried, flag if carried else flag - carry, count)
  return found


def _marks(jaxpr: Any, places: dict[Any, int]) -> Iterator[tuple[int, int, bool]]:
  """The places of each mark's flag and value, -1 without, and whether that counts.

  A step may be a jitted function, which JAX 0.12 leaves as it is until a program is lowered.
  """

  def place_of(atom: Any) -> int:
    return -1 if hasattr(atom, "val") else places.get(atom, -1)

  for eqn in jaxpr.eqns:
    if eqn.primitive is going_p and not eqn.invars[0].aval.shape:
      flag, value = map(place_of, eqn.invars)
      yield flag, value, eqn.params["counts"]
    elif _is_jit(eqn):
      inner = eqn.params["jaxpr"].jaxpr
      yield from _marks(inner, dict(zip(inner.invars, map(place_of, eqn.invars), strict=True)))


def _is_jit(eqn: Any) -> bool:
  return eqn.primitive.name in ("jit", "pjit")


def evaluate(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  """The results of an equation of a body, of which no loop will find the flag."""
  if eqn.primitive is going_p:
    return inputs[1:]
  if _is_jit(eqn) and any(True for _ in _marks(eqn.params["jaxpr"].jaxpr, {})):
    return walk.interpret(eqn.params["jaxpr"], inputs, evaluate)
  return walk.bind_equation(eqn, inputs)


def ending(
  flag: int, params: dict[str, Any], inputs: Sequence[Any]
) -> tuple[dict[str, Any], list[Any]]:
  """The parameters and operands of a `while_loop` that ends with a flag among its carry."""
  consts, body_consts, carry = loops.split_operands(params, inputs)
  cond = jaxpr_as_fun(params["cond_jaxpr"])

  def goes_on(*operands: Any) -> Any:
    return cond(*operands)[0] & operands[len(consts) + flag]

  return _with_condition(goes_on, params, consts, body_consts, carry)


def in_range(
  flags: Any, reverse: bool, unroll: int, params: dict[str, Any], inputs: Sequence[Any]
) -> tuple[dict[str, Any], list[Any]]:
  """The same of the `while_loop` of a scan over all flags, of which it runs the true ones' steps.

  It carries the number of rounds, of `unroll` steps, before what the scan does.
  """
  first, last = _range_of(flags, reverse)
  consts, body_consts, carry = loops.split_operands(params, inputs)
  begin, end = first // unroll, (last + unroll - 1) // unroll
  carry[0] = begin.astype(carry[0].dtype)
  cond = jaxpr_as_fun(params["cond_jaxpr"])

  def goes_on(end: Any, *operands: Any) -> Any:
    return cond(*operands)[0] & (operands[len(consts)] < end.astype(carry[0].dtype))

  return _with_condition(goes_on, params, [end, *consts], body_consts, carry)


def _range_of(flags: Any, reverse: bool) -> tuple[Any, Any]:
  """The first step with a true flag, and the step after the last one; in the order of the loop.

  The flags change once: it is where half of what is left differs from the first.
  """
  length = flags.shape[0]

  def flag(step: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(flags, length - 1 - step if reverse else step, 0, False)

  def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
    same, other = bounds
    middle = same + (other - same) // 2
    is_same = flag(middle) == begins
    return jnp.where(is_same, middle, same), jnp.where(is_same, other, middle)

  begins, end = flag(np.int32(0)), jnp.asarray(length, np.int32)
  _, change = jax.lax.fori_loop(0, 32, halve, (jnp.zeros_like(end), end))
  return jnp.where(begins, 0, change), jnp.where(begins, change, end)


def _with_condition(
  goes_on: Callable[..., Any], params: dict[str, Any],
  consts: list[Any], body_consts: list[Any], carry: list[Any],
) -> tuple[dict[str, Any], list[Any]]:  # fmt: skip
  closed = jax.make_jaxpr(goes_on)(*consts, *carry)
  params = {**params, "cond_jaxpr": closed, "cond_nconsts": len(consts)}
  return params, [*consts, *body_consts, *carry]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, counts: bool) -> tuple[Any, Any]:
  (going, x), (_, tangent) = primals, tangents
  if not isinstance(tangent, ad.Zero):
    tangent = going_p.bind(going, tangent, counts=False)
  return going_p.bind(going, x, counts=counts), tangent


def _transpose(cotangent: Any, going: Any, x: Any, *, counts: bool) -> list[Any]:
  del x, counts
  if isinstance(cotangent, ad.Zero):
    return [None, cotangent]
  return [None, going_p.bind(going, cotangent, counts=False)]


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, counts: bool) -> tuple[Any, Any]:
  """Without a mark where lanes have flags of their own."""
  (going, x), (of_going, dim) = operands, dims
  return (x if of_going is not None else going_p.bind(going, x, counts=counts)), dim


going_p.def_impl(lambda going, x, *, counts: x)
going_p.def_abstract_eval(lambda going, x, *, counts: x)
mlir.register_lowering(going_p, lambda context, going, x, *, counts: [x])
ad.primitive_jvps[going_p] = _jvp
ad.primitive_transposes[going_p] = _transpose
batching.primitive_batchers[going_p] = _batch
