"""Sharding rules that are functions of the mesh and the operands.

Called while a program is compiled, with the shardings that XLA has propagated; in an explicitly
sharded program also while it is traced, with those that the operands' types have.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from callgate._core.errors import GateDefinitionError
from callgate._jax import partitioner, tracing
from callgate._sharding import rules
from callgate._sharding.rules import Rule, Shape
from callgate._sharding.tiles import Plan, Tiling

Function = Callable[..., Any]


def plan(
  label: str,
  function: Function,
  axes: Sequence[tuple[str, int]],
  operands: Sequence[tuple[Shape, Any, Any]],
  results: Sequence[Shape],
  *,
  tap: bool = False,
) -> Rule | Plan:
  """What the function says of operands (shape, dtype, `HloSharding`) on the mesh of `axes`."""
  if not axes:
    raise GateDefinitionError(
      f"{label}: sharding: expected a program whose mesh is known, since the rule is a function of "
      "it; got none. Enter the mesh with jax.set_mesh, or give arguments a NamedSharding on it"
    )
  mesh = AbstractMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
  structs = [
    jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, partitioner.spec_of_sharding(sharding, mesh))
    )
    for shape, dtype, sharding in operands
  ]
  shapes = [shape for shape, _, _ in operands]
  found = _ask(label, function, mesh, structs, results, tap=tap)
  if isinstance(found, Rule):
    return found
  tilings = [
    _tiling(label, mesh, spec, shape)
    for specs, side in zip(found, (shapes, results), strict=True)
    for spec, shape in zip(specs, side, strict=True)
  ]
  return Plan(tuple(tilings[: len(shapes)]), tuple(tilings[len(shapes) :]), mesh.size)


def whole_axes(
  label: str,
  function: Function,
  axes: Sequence[tuple[str, int]],
  values: Sequence[tuple[Shape, Any, Any]],
) -> set[tuple[int, int]]:
  """Of a tap: (leaf, dimension) of those dimensions that the function wants whole.

  Arguments are those of `plan`. What the function leaves split stays as it lies.
  """
  found = plan(label, function, axes, values, [], tap=True)
  if isinstance(found, Rule):
    return {
      (leaf, axis)
      for leaf, term in enumerate(found.operands)
      for axis, factor in enumerate(term)
      if factor in found.whole
    }
  return {
    (leaf, axis)
    for leaf, tiling in enumerate(found.operands)
    for axis, count in enumerate(tiling.counts)
    if count == 1
  }


_names: weakref.WeakKeyDictionary[Function, str] = weakref.WeakKeyDictionary()
_named: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def name_of(function: Function) -> str:
  """What programs call a tap's rule by: the same in the next process that makes them in order."""
  with _lock:
    name = _names.get(function)
    if name is None:
      base = f"rule:{function.__module__}.{getattr(function, '__qualname__', 'rule')}"
      number = sum(known.partition("#")[0] == base for known in _named)
      name = f"{base}#{number}" if number else base
      _names[function] = name
      _named[name] = function
    return name


def named(name: str) -> Function | None:
  """The live rule of a name, or None."""
  return _named.get(name)


def specs(
  label: str, function: Function, avals: Sequence[Any], results: Sequence[Shape]
) -> Rule | list[list[Any]]:
  """What it says of operands of an explicitly sharded program: a rule, or the results' specs."""
  mesh = next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
  structs = [
    jax.ShapeDtypeStruct(
      aval.shape, aval.dtype, sharding=NamedSharding(mesh, PartitionSpec(*tracing.spec_of(aval)))
    )
    for aval in avals
  ]
  found = _ask(label, function, mesh, structs, results)
  return found if isinstance(found, Rule) else [list(spec) for spec in found[1]]


def _ask(
  label: str,
  function: Function,
  mesh: Any,
  operands: Sequence[Any],
  results: Sequence[Shape],
  *,
  tap: bool = False,
) -> Rule | tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
  found = function(mesh, *operands)
  shapes = [operand.shape for operand in operands]
  if tap and isinstance(found, str):
    return rules.of_tap(label, found, shapes)
  if tap and not isinstance(found, tuple):
    found = (found, ())
  if isinstance(found, str):
    return rules.of_call(label, found, shapes, results)
  if not isinstance(found, tuple) or len(cast("tuple[Any, ...]", found)) != 2:
    raise GateDefinitionError(
      f"{label}: sharding: the function returned {found!r}; expected 'shard', 'gather', a rule "
      "such as 'i j, j k -> i k', or (operands' PartitionSpecs, results' PartitionSpecs)"
    )
  ins, outs = cast("tuple[Any, Any]", found)
  return _full(label, "operand", ins, shapes), _full(label, "result", outs, results)


def _full(label: str, kind: str, given: Any, shapes: Sequence[Shape]) -> list[tuple[Any, ...]]:
  """One spec an array, with an entry for each dimension."""
  found = [given] if isinstance(given, PartitionSpec) else list(given)
  if len(found) != len(shapes) or not all(isinstance(spec, PartitionSpec) for spec in found):
    raise GateDefinitionError(
      f"{label}: sharding: the function returned {given!r}; expected a PartitionSpec for each of "
      f"{len(shapes)} {kind}(s)"
    )
  for spec, shape in zip(found, shapes, strict=True):
    if len(spec) > len(shape):
      raise GateDefinitionError(
        f"{label}: sharding: the function returned {spec} for a {kind} of shape {list(shape)}; "
        f"expected at most {len(shape)} entries"
      )
  return [
    (*spec, *[None] * (len(shape) - len(spec))) for spec, shape in zip(found, shapes, strict=True)
  ]


def _tiling(label: str, mesh: Any, spec: Sequence[Any], shape: Shape) -> Tiling:
  sizes = dict(mesh.shape)
  position = dict(
    zip(sizes, np.unravel_index(np.arange(mesh.size), tuple(sizes.values())), strict=True)
  )
  counts: list[int] = []
  index = np.zeros((mesh.size, len(shape)), int)
  for axis, entry in enumerate(spec):
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    extents = tuple(sizes[name] for name in cast("tuple[str, ...]", names))
    counts.append(int(np.prod(extents, dtype=int)))
    if names:
      parts = tuple(position[name] for name in cast("tuple[str, ...]", names))
      index[:, axis] = np.ravel_multi_index(parts, extents)
    if shape[axis] % counts[-1]:
      raise GateDefinitionError(
        f"{label}: sharding: the function splits dimension {axis} of shape {list(shape)} "
        f"{counts[-1]} ways; expected a divisor of {shape[axis]}"
      )
  return Tiling(tuple(counts), index, np.zeros(mesh.size, int))
