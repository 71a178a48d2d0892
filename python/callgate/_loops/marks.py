# SPDX-License-Identifier: Apache-2.0
"""The marks in loops' bodies: of progress bars, and of flags that end a loop.

The body of a loop that ends early gets a flag in each step. If the flag is False, the body keeps
the carry and returns zeros as ys. Lanes of `vmap` may have flags of their own; then the loop ends
with the last lane. This alone is correct under all of JAX's transformations, but it runs through
all steps. So the body marks the values that it carries and returns by `while_going`, an identity.
When a loop is lowered, a mark at the top of its body shows which flag it is, and the loop ends at
the flag's first False. In the loops that JAX makes for derivatives, the flags are residuals of the
loop before, one for each step. In a loop that runs backwards they may begin with False.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir, partial_eval

from callgate._jax import walk
from callgate._jax.tracing import Primitive
from callgate._loops.primitive import Bar, progress_p

going_p = Primitive("while_going")


def while_going(going: Any, count: Any, values: Any) -> tuple[Any, Any]:
  """Returns the count of steps and the values, marked: they change only while `going`.

  It marks the count, if there is one, and differentiable values, for the loops of their
  derivatives.
  """
  if count is not None:
    count = going_p.bind(going, count, counts=True)

  def marked(x: Any) -> Any:
    return going_p.bind(going, x, counts=False) if jnp.issubdtype(x.dtype, jnp.inexact) else x

  return count, jax.tree.map(lambda x: marked(jnp.asarray(x)) if jax.typeof(x) else x, values)


@dataclasses.dataclass(frozen=True)
class Going:
  """The place of the flag in a loop's body: in the carry, or else among the scanned arrays.

  Attributes:
    flag: its index there; the flag may be an array, and the loop continues if any element is True.
    count: the index of the count of steps in the carry; None if the body doesn't count.
  """

  carried: bool
  flag: int
  count: int | None = None


@dataclasses.dataclass(frozen=True)
class Unmarked:
  """A loop's body without the marks at its top.

  Attributes:
    bars: the bars of the marks.
    numbers: a jaxpr with the body's inputs, of the numbers that the bars' marks read; it has no
      effect.
    flags: for each mark of a flag: the flag's index, the marked value's index (-1 if it is no
      operand), and True if the value is the count.
  """

  closed: Any
  bars: list[Bar]
  numbers: Any
  flags: list[tuple[int, int, bool]]

  def going(self, consts: int, carry: int) -> Going | None:
    """Returns the flag, given the numbers of constants and carried operands; None without one."""
    found: Going | None = None
    for flag, value, counts in self.flags:
      flag, value = flag - consts, value - consts
      carried, count = flag < carry, value if counts and 0 <= value < carry else None
      if flag >= 0 and (found is None or count is not None):
        found = Going(carried, flag if carried else flag - carry, count)
    return found


def are_in(body: Any) -> bool:
  """True if a loop's body has marks at its top, or in its jitted functions.

  JAX 0.12 doesn't inline a jitted step before a program is lowered.
  """
  return any(eqn.primitive in (going_p, progress_p) for eqn in walk.equations(body, _jitted))


def _jitted(eqn: Any) -> list[Any]:
  return [eqn.params["jaxpr"]] if eqn.primitive.name in ("jit", "pjit") else []


def taken_out(closed: Any) -> Unmarked:
  """Returns a loop's body without its marks."""
  bars: list[Bar] = []
  flags: list[tuple[int, int, bool]] = []

  def body(*operands: Any) -> tuple[list[Any], list[Any]]:
    numbers: list[Any] = []
    places = {id(operand): place for place, operand in enumerate(operands)}
    of_lanes: list[Any] = []  # kept alive, so that no other value gets their ids

    def rule(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
      if eqn.primitive is progress_p:
        bars.append(bar := eqn.params["bar"])
        numbers.extend(inputs[: bar.numbers])
        return []
      if eqn.primitive is going_p:
        if not jnp.shape(inputs[0]):
          flag, value = (places.get(id(x), -1) for x in inputs)
          flags.append((flag, value, eqn.params["counts"]))
        return inputs[1:]
      if eqn.primitive is jax.lax.reduce_or_p and id(inputs[0]) in places:
        of_lanes.extend(walk.bind_equation(eqn, inputs))
        places[id(of_lanes[-1])] = places[id(inputs[0])]
        return of_lanes[-1:]
      for inner in filter(are_in, _jitted(eqn)):
        return walk.interpret(inner, inputs, rule)
      return walk.bind_equation(eqn, inputs)

    return walk.interpret(closed, operands, rule), numbers

  both = jax.make_jaxpr(body)(*closed.in_avals)
  is_result = [place < len(closed.out_avals) for place in range(len(both.out_avals))]
  pure = [eqn for eqn in both.jaxpr.eqns if not eqn.effects]
  without_effects = both.jaxpr.replace(eqns=pure, effects=frozenset())
  results, _ = partial_eval.dce_jaxpr(both.jaxpr, is_result, instantiate=True)
  numbers, _ = partial_eval.dce_jaxpr(
    without_effects, [not it for it in is_result], instantiate=True
  )
  return Unmarked(both.replace(jaxpr=results), bars, both.replace(jaxpr=numbers), flags)


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
  """If lanes have flags of their own, the values change while any lane continues."""
  (going, x), (of_going, dim) = operands, dims
  if of_going is None:
    return going_p.bind(going, x, counts=counts), dim
  return going_p.bind(jax.lax.reduce_or(going, (of_going,)), x, counts=False), dim


going_p.def_impl(lambda going, x, *, counts: x)
going_p.def_abstract_eval(lambda going, x, *, counts: x)
mlir.register_lowering(going_p, lambda context, going, x, *, counts: [x])
ad.primitive_jvps[going_p] = _jvp
ad.primitive_transposes[going_p] = _transpose
batching.primitive_batchers[going_p] = _batch
