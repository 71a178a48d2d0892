# SPDX-License-Identifier: Apache-2.0
"""`callgate.find_nan`: the first equation of a program that makes a NaN or an infinity."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import options, signatures
from callgate._core.dtypes import type_text
from callgate._nan import findings, lanes, watched

_MOST = 100  # reports


@dataclasses.dataclass(frozen=True)
class NanReport:
  """The first finding of `find_nan`; `str()` says it in words.

  Attributes:
    kind: "nan" or "inf".
    primitive: the operation that made it, as JAX calls it; "input" for a NaN that f was given.
    source: "file:line (function)" of the code that traced it, or that called JAX's own function
      with it; "" where it is not known. For an "input" the argument's name: "params['w']".
    step: the number of the loop's step, from 0; a tuple, outermost first, in loops within each
      other; None outside of loops.
    lane: of `jax.vmap`, likewise: of the levels over which the result differs.
    index: of the first such element of the result, as vmap has it, lanes included.
    shard: in a `jax.shard_map` the number of the device's part, which has the result; None outside.
    operands: type and range of each operand, as text.
    result: the result's type, as text.
    argument: for an "input" the argument's name, as in source; else None.
    callee: of a gate or kernel, its kind and name: "gate 'score'"; else None.
    all: the reports of all places, this one the first, in the program's order, behind them those of
      inputs, at most 100. An operation in a loop is one place, with the step that made the first.
      Empty in the reports of the list.
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
    lines = [f"{maker} made {made}{where}, at {list(self.index)} of {self.result}"]
    lines += [f"  at {self.source}"] if self.source else []
    lines += [f"  operand {i}: {text}" for i, text in enumerate(self.operands)]
    return "\n".join(lines)


def find_nan(f: Callable[..., Any], *, reaching: bool = False) -> Callable[..., NanReport | None]:
  """Finds the first operation of a program that makes a NaN or an infinity.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  def step(x, t):
    return x - 1.0, jnp.log(x) * t

  report = cg.find_nan(lambda x: jax.lax.scan(step, x, jnp.arange(5.0)))(2.5)
  assert (report.primitive, report.kind, report.step) == ("log", "nan", 3)
  print(report)
  ```

  The program runs compiled, as one: in loops, branches, inner jits, under vmap and in gradients
  (`find_nan(jax.grad(f))`) each operation's results are looked at. An operation *makes* a NaN that
  has one among its results and none among its operands; an infinity, where its operands are all
  finite. If none makes any, a NaN in f's arguments is reported, as "input". Under vmap a lane
  counts in the branches that it takes, and in a loop until it has ended.
  `jax_debug_nans` runs a program once more op by op, and tells no step and no lane.

  Args:
    f: a function that `jax.jit` takes.
    reaching: True reports only a NaN or infinity that gets into a result of f: from the operation
      to the result leads a path of values that each have one. `jnp.where` hands on what it chooses.
      A value counts as a whole: index and lane are those of its first.

  Returns:
    A function of f's arguments that runs it, and returns a `NanReport`, or None if there is
    nothing to report. f's own results are dropped; gates and taps in it run as they do in f.

  Raises:
    GateDefinitionError: f is not callable, or reaching is no bool.
  """
  options.function("find_nan", "f", f)
  options.boolean("find_nan", "reaching", reaching)

  @functools.wraps(f, updated=())
  def find(*args: Any, **kwargs: Any) -> NanReport | None:
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def of_arrays(*given: Any) -> Any:
      every = list(leaves)
      for index, value in zip(arrays, given, strict=True):
        every[index] = value
      args, kwargs = jax.tree.unflatten(tree, every)
      return f(*args, **kwargs)

    given = [leaves[i] for i in arrays]
    with lanes.marking():
      watch = watched.Watch(jax.make_jaxpr(of_arrays)(*given), bool(reaching))
    rows, reached = jax.device_get(jax.jit(watch.run)(*given))
    found = np.flatnonzero(rows.kind != findings.NONE)
    inputs: Any = range(len(given))
    if reached is not None:
      found = [number for number in found if reached[number]]
      inputs = np.flatnonzero(reached[rows.kind.size :])
    places = [(watch.equations[i], findings.Rows(*(x[i] for x in rows))) for i in found]
    places.sort(key=lambda place: _order(*place))
    reports = [_report(*place) for place in places[:_MOST]]
    named = list(zip(_names(f, args, kwargs), leaves, strict=True))
    reports += _reports_of_inputs([named[arrays[i]] for i in inputs])
    return dataclasses.replace(reports[0], all=reports[:_MOST]) if reports else None

  return find


def _names(f: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
  """The names of the leaves of f's arguments."""
  names, _ = signatures.places(f, 0, {})
  names += [f"argument {i}" for i in range(len(names), len(args))]
  named = [*zip(names, args, strict=False), *((name, kwargs[name]) for name in sorted(kwargs))]
  return [
    name + jax.tree_util.keystr(path)
    for name, value in named
    for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]
  ]


def _reports_of_inputs(named: list[tuple[str, Any]]) -> list[NanReport]:
  """The arguments with a NaN, which no operation has made."""
  reports: list[NanReport] = []
  for name, leaf in named:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      continue
    has_nan = np.asarray(jnp.isnan(leaf))
    if has_nan.any():
      index = tuple(map(int, np.unravel_index(int(has_nan.argmax()), has_nan.shape)))
      text = type_text(jnp.result_type(leaf), has_nan.shape)
      reports.append(NanReport("nan", "input", name, None, None, index, None, (), text, name))
  return reports


def _order(equation: findings.Equation, row: findings.Rows) -> tuple[int, ...]:
  """Orders findings as the program comes to them."""
  looped = zip(equation.around, row.steps[: equation.loops].tolist(), strict=True)
  numbers = [number for pair in looped for number in pair]
  return *numbers, equation.number


def _is_array(leaf: Any) -> bool:
  return isinstance(leaf, (int, float, complex)) or hasattr(leaf, "dtype")


def _report(found: findings.Equation, row: findings.Rows) -> NanReport:
  result = found.results[int(row.result)]
  index = tuple(map(int, np.unravel_index(int(row.place), result.shape)))
  # Lanes that ran one after another: vmap batches from the innermost level on.
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
  return f"{text}, {least:.6g}" if least == most else f"{text}, {least:.6g} to {most:.6g}"
