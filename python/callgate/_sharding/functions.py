# SPDX-License-Identifier: Apache-2.0
"""Sharding rules that are functions of the mesh and the operands.

They run when a program is compiled, with the shardings that XLA has propagated. In an explicitly
sharded program they also run during tracing, with the shardings in the operands' types.
"""

from __future__ import annotations

import functools
import math
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
from callgate._sharding.tiles import TilePlan, Tiling

Function = Callable[..., Any]
Spec = Sequence[Any]  # like a PartitionSpec, with an entry for each dimension


def plan(
  label: str,
  function: Function,
  axes: Sequence[tuple[str, int]],
  operands: Sequence[tuple[Shape, Any, Any]],
  results: Sequence[Shape],
  *,
  tap: bool = False,
) -> Rule | TilePlan:
  """Calls the function with operands (shape, dtype, `HloSharding`) on the mesh of `axes`."""
  if not axes:
    raise GateDefinitionError(
      f"{label}: sharding: a function of the mesh needs a program with a known mesh, got none. "
      "Set the mesh with jax.set_mesh, or pass arguments with a NamedSharding"
    )
  mesh = AbstractMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
  known = [(shape, d, partitioner.spec_of_sharding(given, mesh)) for shape, d, given in operands]
  found = _ask(label, function, mesh, known, results, tap=tap)
  if isinstance(found, Rule):
    return found
  tiling = functools.partial(_tiling, label, mesh)
  ins = tuple(map(tiling, found[0], [shape for shape, _, _ in operands]))
  return TilePlan(ins, tuple(map(tiling, found[1], results)), mesh.size)


def result_specs(
  label: str, function: Function, avals: Sequence[Any], results: Sequence[Shape]
) -> Rule | Sequence[Spec]:
  """Calls the function in an explicitly sharded program; returns a rule, or the results' specs."""
  mesh = next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
  known = [(aval.shape, aval.dtype, PartitionSpec(*tracing.spec_of(aval))) for aval in avals]
  found = _ask(label, function, mesh, known, results)
  return found if isinstance(found, Rule) else found[1]


# Guarded by _lock.
_named: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def name_of(function: Function) -> str:
  """Returns a tap rule's name for programs, the same in processes that name rules in one order."""
  base = f"rule:{function.__module__}.{getattr(function, '__qualname__', 'rule')}"
  with _lock:
    names = [base, *(f"{base}#{number}" for number in range(1, len(_named) + 1))]
    own = (name for name in names if _named.get(name) is function)
    name = next(own, None) or next(name for name in names if name not in _named)
    _named[name] = function
    return name


def named(name: str) -> Function | None:
  return _named.get(name)


def _ask(
  label: str,
  function: Function,
  mesh: Any,
  operands: Sequence[tuple[Shape, Any, PartitionSpec]],
  results: Sequence[Shape],
  *,
  tap: bool = False,
) -> Rule | tuple[list[Spec], list[Spec]]:
  shapes = [shape for shape, _, _ in operands]
  placed = [(shape, dtype, NamedSharding(mesh, spec)) for shape, dtype, spec in operands]
  found = function(mesh, *(jax.ShapeDtypeStruct(s, d, sharding=p) for s, d, p in placed))
  if isinstance(found, str):
    return rules.of_call(label, found, shapes, results, tap=tap)
  if tap and not isinstance(found, tuple):
    found = (found, ())
  said = f"{label}: sharding: the function returned"
  if not isinstance(found, tuple) or len(cast("tuple[Any, ...]", found)) != 2:
    raise GateDefinitionError(
      f"{said} {found!r}; expected 'shard', 'gather', a rule such as 'i j, j k -> i k', or "
      "(operands' PartitionSpecs, results' PartitionSpecs)"
    )
  ins, outs = cast("tuple[Any, Any]", found)
  return _full(said, "operand", ins, shapes), _full(said, "result", outs, results)


def _full(said: str, kind: str, given: Any, shapes: Sequence[Shape]) -> list[Spec]:
  """Returns one spec for each array, with an entry for each dimension."""
  found = [given] if isinstance(given, PartitionSpec) else list(given)
  if len(found) != len(shapes) or not all(isinstance(spec, PartitionSpec) for spec in found):
    expected = f"a PartitionSpec for each of {len(shapes)} {kind}(s)"
    raise GateDefinitionError(f"{said} {given!r}; expected {expected}")
  for spec, shape in zip(found, shapes, strict=True):
    if len(spec) > len(shape):
      raise GateDefinitionError(
        f"{said} {spec} for a {kind} of shape {list(shape)}; expected at most {len(shape)} entries"
      )
  return [[*spec, *[None] * (len(s) - len(spec))] for spec, s in zip(found, shapes, strict=True)]


def _tiling(label: str, mesh: Any, spec: Spec, shape: Shape) -> Tiling:
  sizes: dict[str, int] = dict(mesh.shape)
  places = np.unravel_index(np.arange(mesh.size), tuple(sizes.values()))
  position = dict(zip(sizes, places, strict=True))
  counts: list[int] = []
  index = np.zeros((mesh.size, len(shape)), int)
  for axis, entry in enumerate(spec):
    names: tuple[str, ...] = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    extents = tuple(sizes[name] for name in names)
    counts.append(math.prod(extents))
    if names:
      index[:, axis] = np.ravel_multi_index(tuple(position[name] for name in names), extents)
    if shape[axis] % counts[-1]:
      raise GateDefinitionError(
        f"{label}: sharding: the function splits dimension {axis} of shape {list(shape)} "
        f"{counts[-1]} ways; expected a divisor of {shape[axis]}"
      )
  return Tiling(tuple(counts), index, np.zeros(mesh.size, int))
