# SPDX-License-Identifier: Apache-2.0
"""`callgate.find_nan`: finds the first equation of a program that makes a NaN or an infinity."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import options, signatures, split
from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError
from callgate._nan import constants, findings, lanes, watched

_MOST = 100  # reports at most


@dataclasses.dataclass(frozen=True)
class NanReport:
  """The first finding of `find_nan`; `str()` formats it as text.

  Attributes:
    kind: "nan" or "inf".
    primitive: JAX's name of the operation that made it; "input" for a NaN in an argument of f;
      "constant" for a NaN in an array that f closes over, or in a literal.
    source: "file:line (function)" of the code that traced the operation, outside JAX; "" if
      unknown. For an "input" the argument's name: "params['w']". For a "constant" the line of its
      first use.
    step: the loop's step, counted from 0; a tuple for nested loops, outermost first; None outside
      loops.
    lane: the lane of a `jax.vmap`, in the same form; it leaves out a vmap over which the result is
      the same.
    index: the index of the first such element in the result, with the axes of vmap.
    shard: the number of the device's part in a `jax.shard_map`; None outside.
    operands: the type and range of each operand, as text.
    result: the result's type, as text.
    argument: the argument's name for an "input"; else None.
    callee: the kind and name of a gate or kernel: "gate 'score'"; else None.
    all: the reports of all places in program order, starting with this one, at most 100; inputs
      and closed-over arrays come last. An operation in a loop is one place, with the first step
      that made a NaN or infinity. Empty in the reports of this list.
  """

  kind: Literal["nan", "inf"]
  primitive: str
  source: str
  step: int | tuple[int, ...] | None
  lane: int | tuple[int, ...] | None
  index: tuple[int, ...]
  shard: int | None
  operands: tuple[str, ...]
  result: str
  argument: str | None = None
  callee: str | None = None
  all: list[NanReport] = dataclasses.field(
    default_factory=list["NanReport"], repr=False, compare=False
  )

  def __str__(self) -> str:
    made = {"nan": "a NaN", "inf": "an infinity"}[self.kind]
    if self.primitive == "input":
      return f"the input '{self.argument}' has {made}, at {list(self.index)} of {self.result}"
    parts = [f"step {self.step}"] if self.step is not None else []
    parts += [f"lane {self.lane}"] if self.lane is not None else []
    parts += [f"shard {self.shard}"] if self.shard is not None else []
    where = f" in {', '.join(parts)}" if parts else ""
    maker = self.callee or f"'{self.primitive}'"
    verb = "made"
    if self.primitive == "constant":
      maker, verb = "a constant", "has"
    lines = [f"{maker} {verb} {made}{where}, at {list(self.index)} of {self.result}"]
    lines += [f"  at {self.source}"] if self.source else []
    lines += [f"  operand {i}: {text}" for i, text in enumerate(self.operands)]
    return "\n".join(lines)


def find_nan(f: Callable[..., Any], *, reaching: bool = False) -> Callable[..., NanReport | None]:
  """Finds the first operation of a compiled program that makes a NaN or an infinity.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  def step(x, t):
    return x - 1.0, jnp.log(x) * t

  report = cg.find_nan(lambda x: jax.lax.scan(step, x, jnp.arange(5.0)))(2.5)
  assert (report.primitive, report.kind, report.step) == ("log", "nan", 3)
  print(report)
  ```

  It works in loops, branches, inner jits, under vmap and in gradients: `find_nan(jax.grad(f))`. An
  operation makes a NaN if a result has one and no operand has one. It makes an infinity if a result
  has one and all operands are finite. If no operation makes a NaN, a NaN in f's arguments is
  reported as "input", and a NaN in an array that f closes over as "constant". Lanes of a vmap count
  only in the branches that they take, and in loops until they end. `jax_debug_nans` instead runs a
  program again op by op, and reports neither step nor lane.

  Args:
    f: a function that `jax.jit` accepts.
    reaching: True reports only a NaN or infinity that reaches a result of f: each value on a path
      from the operation to the result contains one. `jnp.where` passes on only the elements that it
      selects. All other values count as a whole: index and lane are those of the first NaN or
      infinity in them. A NaN in a closed-over array or a literal counts as made by the first
      operation on it. If no operation uses it (it is itself a result, or a loop's first carry), it
      is a "constant".

  Returns:
    A function with f's arguments that runs f and returns a `NanReport`, or None if there is nothing
    to report. It drops f's results. Gates and taps in f run as usual. As with `jax.jit`, calls with
    arguments of the same shapes and dtypes reuse the compiled program.

  Raises:
    GateDefinitionError: f is not callable, `reaching` is not a bool, or the returned function is
      called inside `jax.jit`, `jax.vmap` or `jax.grad`: write `find_nan(jax.vmap(f))`.
  """
  options.function("find_nan", "f", f)
  options.boolean("find_nan", "reaching", reaching)

  source = _definition(f)
  program = jax.jit(lambda given: f(*(parts := split.joined(given))[0], **parts[1]))

  @functools.lru_cache  # by identity
  def watching(closed: Any) -> tuple[watched.Watch, Callable[..., Any]]:
    watch = watched.Watch(closed, bool(reaching), source)
    return watch, jax.jit(watch.run)

  @functools.wraps(f, updated=())
  def find(*args: Any, **kwargs: Any) -> NanReport | None:
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    given = [leaves[i] for i in arrays]
    with lanes.marking():
      nodes = [leaf if _is_array(leaf) else split.Static(leaf) for leaf in leaves]
      closed = program.trace(jax.tree.unflatten(tree, nodes)).jaxpr
      if len(closed.jaxpr.invars) != len(given):  # f closes over traced values
        _refuse_inside()
      watch, run = watching(closed)
    rows, reached = jax.device_get(run(*given))
    if any(isinstance(x, jax.Array) for x in rows):  # tracers stay what they are
      _refuse_inside()
    found = np.flatnonzero(rows.kind != findings.NONE)
    inputs: Any = range(len(given))
    if reached is not None:
      found = [number for number in found if reached[number]]
      inputs = np.flatnonzero(reached[rows.kind.size :])
    places = [(watch.equations[i], findings.Rows(*(x[i] for x in rows))) for i in found]
    places.sort(key=lambda place: _order(*place))
    reports = [_report(*place) for place in places[:_MOST]]
    named = list(zip(_names(f, args, kwargs), leaves, strict=True))
    reports += filter(None, (_of_input("input", *named[arrays[i]]) for i in inputs))
    if not reaching:  # else they are among the places
      closed_over = constants.arrays(watch.closed, source)
      reports += filter(None, (_of_input("constant", line, x) for x, line in closed_over))
    return dataclasses.replace(reports[0], all=reports[:_MOST]) if reports else None

  return find


def _refuse_inside() -> NoReturn:
  raise GateDefinitionError(
    "find_nan: expected a call outside of jax.jit, jax.vmap, jax.grad and compiled loops, got one "
    "inside; call it outside, on the transformed function: find_nan(jax.vmap(f))(...)"
  )


def _definition(f: Any) -> str:
  """Returns "file:line (name)" of f's first line; "" if unknown."""
  code = getattr(inspect.unwrap(f), "__code__", None)
  return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"


def _names(f: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
  """Returns the names of the leaves of f's arguments."""
  names, _ = signatures.places(f, 0, {})
  names += [f"argument {i}" for i in range(len(names), len(args))]
  named = [*zip(names, args, strict=False), *((name, kwargs[name]) for name in sorted(kwargs))]
  return [
    name + jax.tree_util.keystr(path)
    for name, value in named
    for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]
  ]


def _of_input(primitive: str, source: str, leaf: Any) -> NanReport | None:
  """Returns the report of an argument or a constant; None without a NaN."""
  if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
    return None
  has_nan = np.asarray(jnp.isnan(leaf))
  if not has_nan.any():
    return None
  index = tuple(map(int, np.unravel_index(int(has_nan.argmax()), has_nan.shape)))
  text = type_text(jnp.result_type(leaf), has_nan.shape)
  argument = source if primitive == "input" else None
  return NanReport("nan", primitive, source, None, None, index, None, (), text, argument)


def _order(equation: findings.Equation, row: findings.Rows) -> tuple[int, ...]:
  """Returns a key that sorts findings in program order."""
  looped = zip(equation.around, row.steps[: equation.loops].tolist(), strict=True)
  numbers = [number for pair in looped for number in pair]
  return *numbers, equation.number


def _is_array(leaf: Any) -> bool:
  """Returns True for a value that a program gets as an array; a bool is mostly a static choice."""
  is_number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
  return is_number or hasattr(leaf, "dtype")


def _report(found: findings.Equation, row: findings.Rows) -> NanReport:
  result = found.results[int(row.result)]
  index = tuple(map(int, np.unravel_index(int(row.place), result.shape)))
  # The lanes of loops over lanes; vmap batches from the innermost level on.
  apart, counts = row.lanes[: len(found.lane_counts)].tolist()[::-1], found.lane_counts[::-1]
  operands = zip(found.operands, row.operands, strict=False)
  return NanReport(
    kind="nan" if row.kind == findings.NAN else "inf",
    primitive=found.primitive,
    source=found.source,
    step=_one_or_many(row.steps[: found.loops].tolist()),
    lane=_one_or_many([*(index[axis] for axis in found.lanes[int(row.result)]), *apart]),
    index=(*apart, *index),
    shard=int(row.shard) if row.shard >= 0 else None,
    operands=tuple(_shown(aval, *limits) for aval, limits in operands),
    result=type_text(result.dtype, (*counts, *result.shape)),
    callee=found.callee,
  )


def _one_or_many(numbers: Any) -> int | tuple[int, ...] | None:
  return None if not numbers else numbers[0] if len(numbers) == 1 else tuple(numbers)


def _shown(aval: Any, least: Any, most: Any) -> str:
  text = type_text(aval.dtype, aval.shape)
  if np.isnan(least) and not np.issubdtype(aval.dtype, np.inexact):
    return text
  is_one = least == most or np.isnan(least)
  return f"{text}, {least:.6g}" if is_one else f"{text}, {least:.6g} to {most:.6g}"
