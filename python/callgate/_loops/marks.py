# SPDX-License-Identifier: Apache-2.0
"""The marks in loops' bodies: of progress bars, and of flags that end a loop.

A loop that ends early has a body that takes a flag with each step. Where the flag is false it
leaves the carry as it is, and its ys zeros. Lanes of `vmap` may have flags of their own: then the
loop ends with the last of them. That alone is right under every transformation of
JAX's, but walks through all steps. So the body marks what it carries and returns by `while_going`,
which is the identity; where a loop is lowered, a mark at the top of its body tells which flag that
is. The loop then ends with the flag's first False. In the loops that JAX makes for derivatives the
flags come step by step, as what the loop before has kept; they may begin with False, where the loop
runs backwards.
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
    flag: its place there; the flag may be an array, of which any element is to go on.
    count: the place of the count of steps in the carry; None where the body doesn't count.
  """

  carried: bool
  flag: int
  count: int | None = None


@dataclasses.dataclass(frozen=True)
class Unmarked:
  """A loop's body without the marks at its top.

  Attributes:
    bars: those of the marks.
    numbers: a jaxpr like the body, of the numbers that the bars' marks read; it has no effect.
    flags: by mark of a flag, its place and that of the marked value, -1 for what is no operand, and
      whether the value counts.
  """

  closed: Any
  bars: list[Bar]
  numbers: Any
  flags: list[tuple[int, int, bool]]

  def going(self, consts: int, carry: int) -> Going | None:
    """The flag, where so many operands are constants, and so many carried; None without."""
    found: Going | None = None
    for flag, value, counts in self.flags:
      flag, value = flag - consts, value - consts
      carried, count = flag < carry, value if counts and 0 <= value < carry else None
      if flag >= 0 and (found is None or count is not None):
        found = Going(carried, flag if carried else flag - carry, count)
    return found


def are_in(body: Any) -> bool:
  """True if a loop's body has marks at its top, or in its jitted functions.

  JAX 0.12 leaves a jitted step as it is until a program is lowered.
  """
  return any(eqn.primitive in (going_p, progress_p) for eqn in walk.equations(body, _jitted))


def _jitted(eqn: Any) -> list[Any]:
  return [eqn.params["jaxpr"]] if eqn.primitive.name in ("jit", "pjit") else []


def taken_out(closed: Any) -> Unmarked:
  """A loop's body apart from its marks."""
  bars: list[Bar] = []
  flags: list[tuple[int, int, bool]] = []

  def body(*operands: Any) -> tuple[list[Any], list[Any]]:
    numbers: list[Any] = []
    places = {id(operand): place for place, operand in enumerate(operands)}
    of_lanes: list[Any] = []  # kept, so that no other value gets its id

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
  """Where lanes have flags of their own, the values change while one of them goes on."""
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
