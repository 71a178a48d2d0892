"""What counts of parts mean: the specs of `compat.sharded_jit`, their devices and their shardings.

Pure functions of specs, devices and shapes; any thread may call them. `with_sharding_constraint`
is a primitive, as what it means is known when the program around is lowered.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as _Names

from callgate._jax import lowering, tracing
from callgate._jax.tracing import Primitive


class PartitionSpec(tuple[int, ...]):
  """Into how many parts each dimension is split: `PartitionSpec(2, 1)` halves the rows.

  The parts are numbered in row-major order, and the device of that number holds each: an array of
  shape (8, 6) has two tiles, of shape (4, 6). The product of the counts is the number of devices.

  Raises:
    ValueError: a count that is not an integer of at least 1.
  """

  __slots__ = ()

  def __new__(cls, *partitions: int) -> PartitionSpec:
    for count in partitions:
      if not is_count(count):
        raise ValueError(f"PartitionSpec: expected counts of at least 1, got {count!r}")
    return tuple.__new__(cls, map(int, partitions))

  def __getnewargs__(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
    return tuple(self)  # for pickle and copy, which would pass one tuple otherwise

  def __repr__(self) -> str:
    return f"PartitionSpec{tuple.__repr__(self)}"


Parts = PartitionSpec | None  # how one array is split; None is a copy on every device


def is_count(value: object) -> bool:
  """Whether `value` is an integer of at least 1."""
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


def is_parts(value: object) -> bool:
  """Whether `value` is a leaf of `in_parts` and `out_parts`."""
  return value is None or isinstance(value, PartitionSpec)


def _primes(number: int) -> Iterator[int]:
  """The prime factors of a number, in order."""
  prime = 2
  while number > 1:
    if number % prime:
      prime += 1
    else:
      yield prime
      number //= prime


@functools.lru_cache(maxsize=1024)
def sharding_of(devices: tuple[Any, ...], parts: Parts) -> NamedSharding:
  """Tile k, in row-major order, is on device k; axes are prime factors, so specs share a mesh."""
  counts = [tuple(_primes(count)) for count in parts or ()]
  split = list(itertools.chain.from_iterable(counts))
  shape = (*split, *_primes(len(devices) // math.prod(split)))
  axes = tuple(f"parts{axis}" for axis in range(len(shape)))
  mesh, names = Mesh(np.array(devices).reshape(shape), axes), iter(axes)
  return NamedSharding(mesh, _Names(*[tuple(itertools.islice(names, len(c))) for c in counts]))


def flat_parts(parts: Any, tree: Any, what: str) -> list[Parts]:
  """The spec of each leaf of `tree`, of which `parts`, called `what` in messages, is a prefix."""
  specs(parts, what)
  flat: list[Parts] = []

  def repeat(part: Parts, below: Any) -> None:
    flat.extend([part] * len(jax.tree.leaves(below)))

  try:
    jax.tree.map(repeat, parts, tree, is_leaf=is_parts)
  except ValueError as error:
    expected = f"expected a prefix of the tree {jax.tree.structure(tree)}, got {parts}"
    raise ValueError(f"sharded_jit: {what}: {expected}") from error
  return flat


def specs(parts: Any, what: str) -> list[PartitionSpec]:
  """The leaves of a tree of specs that aren't None; `what` is its name in messages."""
  leaves = jax.tree.leaves(parts, is_leaf=is_parts)
  for leaf in leaves:
    if not is_parts(leaf):
      expected = "expected a PartitionSpec or None as leaves"
      raise ValueError(f"sharded_jit: {what}: {expected}, got {leaf!r}")
  return [leaf for leaf in leaves if leaf is not None]


def check(
  parts: Sequence[Parts], shapes: Sequence[tuple[int, ...]], what: str, *, padded: bool = False
) -> None:
  """Raises unless each spec has a count for each dimension and, if not `padded`, divides it."""
  for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
    head, tail = f"sharded_jit: {what}: {part}", f"shape {list(shape)}"
    if part is not None and len(part) != len(shape):
      other = f"array {index} has {len(shape)}: {tail}"
      raise ValueError(f"{head} has {len(part)} dimensions, but {other}")
    for axis, (count, size) in enumerate(zip(part or (), shape, strict=False)):
      if size % count != 0 and not padded:
        split = f"splits dimension {axis} of array {index} {count} ways"
        raise ValueError(f"{head} {split}: expected a multiple of {count}, got {size}: {tail}")


_constraint_p = Primitive("with_sharding_constraint_of_counts")


def with_sharding_constraint(x: Any, parts: Any) -> Any:
  """The identity, which fixes how a value is split inside a `sharded_jit` function.

  The constraint counts for the number of devices: where everything else is replicated, it decides.

  Args:
    x: a pytree of arrays.
    parts: a `PartitionSpec`, None (a copy on every device), or a pytree of them that is a prefix of
      `x`. A spec has a count a dimension. A dimension that a count doesn't divide is padded.

  Returns:
    `x`, with its shapes. Its gradient is split in the same way.

  Raises:
    NotImplementedError: outside of a sharded_jit function.
    ValueError: a spec whose length is not the array's rank, or no prefix of `x`.
  """
  (leaves, tree), what = jax.tree.flatten(x), "with_sharding_constraint"
  flat = flat_parts(parts, x, what)
  check(flat, [jax.typeof(leaf).shape for leaf in leaves], what, padded=True)
  pairs = zip(leaves, flat, strict=True)
  return jax.tree.unflatten(tree, [_constraint_p.bind(leaf, parts=part) for leaf, part in pairs])


def counts_inside(jaxpr: Any) -> Iterator[tuple[int, str]]:
  """How many partitions constraints and nested sharded_jit functions ask for, and who does."""
  for eqn in jaxpr.eqns:
    if eqn.primitive is _constraint_p and (parts := eqn.params["parts"]) is not None:
      yield math.prod(parts), f"with_sharding_constraint with partitions={parts}"
    for sharding in (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())):
      if isinstance(sharding, NamedSharding):
        yield sharding.num_devices, f"the nested {eqn.params.get('name', 'jit')}"
    for inner in tracing.subjaxprs(eqn):
      yield from counts_inside(getattr(inner, "jaxpr", inner))


def _outside(*_: Any, parts: Parts) -> Any:
  got = f"got a constraint with partitions={parts}"
  where = "inside sharded_jit()"
  raise NotImplementedError(f"with_sharding_constraint() should only be called {where}: {got}")


def _lower(context: Any, x: Any, *, parts: Parts) -> Sequence[Any]:
  devices = lowering.program_devices(context)
  if devices is None:  # each device has a part of its own already: inside pmap or shard_map
    return [x]
  if parts is not None and math.prod(parts) != len(devices):
    _outside(parts=parts)  # sharded_jit has checked its own constraints
  sharding = sharding_of(tuple(devices), parts)
  constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
  return [x] if len(devices) == 1 else mlir.lower_fun(constrain, multiple_results=False)(context, x)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, parts: Parts) -> tuple[Any, int]:
  (x,), (dim,) = args, dims
  if parts is not None:
    parts = PartitionSpec(*parts[:dim], 1, *parts[dim:])
  return _constraint_p.bind(x, parts=parts), dim


_constraint_p.def_impl(_outside)
_constraint_p.def_abstract_eval(lambda x, *, parts: x)
mlir.register_lowering(_constraint_p, _lower)
batching.primitive_batchers[_constraint_p] = _batch
ad.deflinear2(_constraint_p, lambda ct, _, *, parts: [_constraint_p.bind(ct, parts=parts)])
