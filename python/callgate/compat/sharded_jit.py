"""`jax.experimental.sharded_jit` of 2020-21: a jit whose arguments and results are split by counts.

```python
import jax.numpy as jnp
from callgate.compat.sharded_jit import PartitionSpec, sharded_jit

add = sharded_jit(lambda x, y: x + y, in_parts=(PartitionSpec(1), None), out_parts=PartitionSpec(1))
assert add(jnp.ones(4), jnp.ones(4)).tolist() == [2.0] * 4
```

It ran on TPUs alone; this one is `jax.jit` with shardings underneath, so it runs on every platform.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as _Names

from callgate import _compat

__all__ = ["PartitionSpec", "sharded_jit", "with_sharding_constraint"]


class PartitionSpec(tuple[int, ...]):
  """Into how many parts each dimension is split: `PartitionSpec(2, 1)` halves the rows.

  Args:
    *partitions: a count a dimension.
  """

  __slots__ = ()

  def __new__(cls, *partitions: int) -> PartitionSpec:
    for count in partitions:
      if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"PartitionSpec: expected counts of at least 1, got {count!r}")
    return tuple.__new__(cls, map(int, partitions))

  def __repr__(self) -> str:
    return f"PartitionSpec({', '.join(map(str, self))})"


Parts = PartitionSpec | None


# -- what a count means --------------------------------------------------------------------------
def _factors(number: int) -> Iterator[int]:
  """The primes of a number, in order."""
  for prime in itertools.count(2):
    while number % prime == 0:
      yield prime
      number //= prime
    if number == 1:
      return


@functools.lru_cache(maxsize=256)
def _mesh(devices: tuple[Any, ...]) -> Mesh:
  """One axis a prime, so that every split of the devices is a sharding over this mesh."""
  shape = tuple(_factors(len(devices)))
  return Mesh(np.array(devices).reshape(shape), tuple(f"parts{i}" for i in range(len(shape))))


@functools.lru_cache(maxsize=1024)
def _sharding(devices: tuple[Any, ...], parts: Parts) -> NamedSharding:
  """The first axes of the mesh that make each count, from the first dimension on."""
  mesh = _mesh(devices)
  free = list(zip(mesh.axis_names, mesh.devices.shape, strict=True))
  names: list[tuple[str, ...]] = []
  for count in parts or ():
    chosen = list[str]()
    for prime in _factors(count):
      axis = next(axis for axis in free if axis[1] == prime)
      free.remove(axis)
      chosen.append(axis[0])
    names.append(tuple(chosen))
  return NamedSharding(mesh, _Names(*names))


def _total(parts: Parts) -> int | None:
  return None if parts is None else math.prod(parts)


def _flat_parts(parts: Any, tree: Any, what: str) -> list[Parts]:
  """The parts of each leaf of `tree`, of which `parts` is a prefix."""
  flat: list[Parts] = []

  def spread(part: Any, below: Any) -> None:
    if not _is_spec(part):
      raise ValueError(
        f"sharded_jit: {what}: expected a PartitionSpec or None as leaves, got {part!r}"
      )
    flat.extend([part] * len(jax.tree.leaves(below)))

  try:
    jax.tree.map(spread, parts, tree, is_leaf=_is_spec)
  except ValueError as error:
    if str(error).startswith("sharded_jit"):
      raise
    raise ValueError(
      f"sharded_jit: {what}: expected a prefix of the tree {jax.tree.structure(tree)}, got {parts}"
    ) from error
  return flat


def _check_ranks(parts: Sequence[Parts], leaves: Sequence[Any], what: str) -> None:
  for index, (part, leaf) in enumerate(zip(parts, leaves, strict=True)):
    if part is not None and len(part) != len(leaf.shape):
      raise ValueError(
        f"sharded_jit: {what}: {part} has {len(part)} dimensions, but array {index} has "
        f"{len(leaf.shape)}: shape {list(leaf.shape)}"
      )


# -- the constraint ------------------------------------------------------------------------------
_constraint_p = Primitive("with_sharding_constraint_of_counts")


def with_sharding_constraint(x: Any, parts: Any) -> Any:
  """The identity, which fixes how a value is split inside a `sharded_jit` function.

  Args:
    x: a pytree of arrays.
    parts: a `PartitionSpec`, None (replicated), or a pytree of them that is a prefix of `x`.

  Returns:
    `x`. Its gradient is split in the same way.

  Raises:
    NotImplementedError: outside of a sharded_jit function.
    ValueError: the parts don't fit the array, or the partitions of the function around.
  """
  leaves, tree = jax.tree.flatten(x)
  flat = _flat_parts(parts, x, "with_sharding_constraint")
  shaped = [jax.typeof(leaf) for leaf in leaves]
  _check_ranks(flat, shaped, "with_sharding_constraint")
  return jax.tree.unflatten(
    tree, [_constraint_p.bind(leaf, parts=part) for leaf, part in zip(leaves, flat, strict=True)]
  )


def _outside(*_: Any, **__: Any) -> Any:
  raise NotImplementedError("with_sharding_constraint() should only be called inside sharded_jit()")


def _lower_constraint(context: Any, x: Any, *, parts: Parts) -> Sequence[Any]:
  devices = _compat.program_devices(context)
  if devices is None:  # each device has a part of its own already: inside pmap or shard_map
    return [x]
  if parts is not None and len(devices) == 1 < math.prod(parts):
    _outside()
  sharding = _sharding(tuple(devices), parts)
  constrain = mlir.lower_fun(
    lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
  )
  return constrain(context, x)


def _batch_constraint(args: Sequence[Any], dims: Sequence[Any], *, parts: Parts) -> tuple[Any, int]:
  (x,), (dim,) = args, dims
  if parts is not None:
    parts = PartitionSpec(*parts[:dim], 1, *parts[dim:])
  return _constraint_p.bind(x, parts=parts), dim


_constraint_p.def_impl(_outside)
_constraint_p.def_abstract_eval(lambda x, *, parts: x)
mlir.register_lowering(_constraint_p, _lower_constraint)
batching.primitive_batchers[_constraint_p] = _batch_constraint
ad.deflinear2(_constraint_p, lambda ct, _, *, parts: [_constraint_p.bind(ct, parts=parts)])


def _counts_inside(jaxpr: Any) -> Iterator[tuple[int, str]]:
  """How many partitions a program's constraints and nested sharded_jit functions ask for."""
  for eqn in jaxpr.eqns:
    if eqn.primitive is _constraint_p:
      parts = eqn.params["parts"]
      if parts is not None:
        yield math.prod(parts), f"with_sharding_constraint with partitions={parts}"
    for sharding in (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())):
      if isinstance(sharding, NamedSharding):
        yield sharding.num_devices, f"the nested {eqn.params.get('name', 'jit')}"
    for inner in _compat.subjaxprs(eqn):
      yield from _counts_inside(getattr(inner, "jaxpr", inner))


# -- one sharded_jit -----------------------------------------------------------------------------
class _Local:
  """What each process passes and gets, where there are several."""

  def __init__(self, in_parts: Any, out_parts: Any, num_partitions: int | None) -> None:
    self.in_parts, self.out_parts, self.num_partitions = in_parts, out_parts, num_partitions

  def count(self, total: int) -> int:
    """How many of `total` partitions are on this process's devices."""
    said = {
      math.prod(part): f"the local parts {part}"
      for part in jax.tree.leaves((self.in_parts, self.out_parts), is_leaf=_is_spec)
      if isinstance(part, PartitionSpec)
    }
    if self.num_partitions is not None:
      said[self.num_partitions] = f"local_num_partitions={self.num_partitions}"
    if len(said) > 1:
      raise ValueError(f"sharded_jit: local partitions disagree: {' and '.join(said.values())}")
    if said:
      count = next(iter(said))
    elif jax.process_count() == 1:
      count = total
    else:
      raise ValueError(
        "sharded_jit: expected local_num_partitions, or local_in_parts or local_out_parts that say "
        f"it: how many of the {total} partitions are on this process's devices"
      )
    devices = jax.local_device_count()
    if count > devices:
      raise ValueError(
        f"sharded_jit computation requires {count} local devices, but only {devices} local devices "
        "are available."
      )
    return count


class _ShardedJit:
  def __init__(
    self,
    fun: Callable[..., Any],
    in_parts: Any,
    out_parts: Any,
    num_partitions: int | None,
    local: _Local,
    static: tuple[int, ...],
  ) -> None:
    self.fun, self.static, self.local = fun, static, local
    self.in_parts = tuple(in_parts) if isinstance(in_parts, list) else in_parts
    self.out_parts, self.num_partitions = out_parts, num_partitions
    self._programs: dict[Hashable, Callable[..., Any]] = {}
    self._lock = threading.Lock()
    self._said = self._counts_of_arguments()  # disagreement is an error before any call

  def _counts_of_arguments(self) -> dict[int, str]:
    said: dict[int, str] = {}
    if self.num_partitions is not None:
      said[self.num_partitions] = f"num_partitions={self.num_partitions}"
    for name, parts in (("in_parts", self.in_parts), ("out_parts", self.out_parts)):
      for part in jax.tree.leaves(parts, is_leaf=_is_spec):
        if isinstance(part, PartitionSpec):
          said.setdefault(math.prod(part), f"{part} in {name}")
    if len(said) > 1:
      texts = [f"{count} ({who})" for count, who in said.items()]
      raise ValueError(
        f"sharded_jit: expected one number of partitions everywhere, got {' and '.join(texts)}"
      )
    return said

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    if kwargs:
      raise NotImplementedError(
        f"sharded_jit over kwargs not yet supported: got {', '.join(kwargs)}; pass them by position"
      )
    if self.static and not all(-len(args) <= i < len(args) for i in self.static):
      raise ValueError(
        f"sharded_jit: static_argnums={self.static}, but {self.fun.__name__} was called with only "
        f"{len(args)} positional arguments"
      )
    fixed = {i % len(args): args[i] for i in self.static}
    given = tuple(arg for i, arg in enumerate(args) if i not in fixed)
    leaves, tree = jax.tree.flatten(given)
    parts = _flat_parts(self.in_parts, given, "in_parts")
    types = [jax.typeof(leaf) for leaf in leaves]
    _check_ranks(parts, types, "in_parts")
    key = (tree, tuple(map(str, types)), tuple(sorted(fixed.items())), _compat.trace_key())
    with self._lock:
      program = self._programs.get(key)
    if program is None:
      program = self._program(given, fixed, types, tree, parts)
      with self._lock:
        self._programs[key] = program
    return program(leaves)

  def _program(
    self,
    given: tuple[Any, ...],
    fixed: dict[int, Any],
    types: list[Any],
    tree: Any,
    parts: list[Parts],
  ) -> Callable[..., Any]:
    def flat(*leaves: Any) -> Any:
      rest = iter(jax.tree.unflatten(tree, leaves))
      total = len(given) + len(fixed)
      return self.fun(*(fixed[i] if i in fixed else next(rest) for i in range(total)))

    flat.__name__ = getattr(self.fun, "__name__", "sharded_jit")
    structs = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
    traced = jax.jit(flat).trace(*structs)
    out_parts = _flat_parts(self.out_parts, traced.out_info, "out_parts")
    _check_ranks(out_parts, jax.tree.leaves(traced.out_info), "out_parts")
    count = self._count(traced.jaxpr.jaxpr)
    if count is None or _compat.in_manual_region():
      # Replicated on as many devices as the program around has; parts of parts are not split again.
      return _runner(traced, flat.__name__, {}, [None] * len(types))
    devices = self._devices(count)
    shardings = [_sharding(devices, part) for part in parts]
    options = {
      "in_shardings": tuple(shardings),
      "out_shardings": [_sharding(devices, part) for part in out_parts],
    }
    return _runner(traced, flat.__name__, options, shardings)

  def _count(self, jaxpr: Any) -> int | None:
    """The number of partitions; None where nothing says it and the program around may."""
    count = next(iter(self._said), None)
    for inside, who in _counts_inside(jaxpr):
      if count is not None and inside != count:
        raise ValueError(
          f"{who} (total partitions: {inside}) doesn't match expected number of partitions: "
          f"{count}. If these partitions look right, check outer sharded_jit and/or other "
          "with_sharding_constraint calls."
        )
      count = inside
    return count

  def _devices(self, count: int) -> tuple[Any, ...]:
    if jax.process_count() == 1:
      devices = jax.local_devices()
      if count > len(devices):
        raise ValueError(
          f"sharded_jit computation requires {count} devices, but only {len(devices)} devices are "
          "available."
        )
      return tuple(devices[:count])
    raise NotImplementedError("sharded_jit over several processes")


def _runner(
  traced: Any, name: str, options: dict[str, Any], shardings: Sequence[NamedSharding | None]
) -> Callable[[list[Any]], Any]:
  """What runs a traced program on flat arguments; it is not traced again."""
  closed = jaxpr_as_fun(traced.jaxpr)
  tree = jax.tree.structure(traced.out_info)

  def flat(*leaves: Any) -> list[Any]:
    return closed(*leaves)

  flat.__name__ = flat.__qualname__ = name
  compiled = jax.jit(flat, **options)

  def run(leaves: list[Any]) -> Any:
    placed = [
      leaf if sharding is None or isinstance(leaf, jax.core.Tracer) else _put(leaf, sharding)
      for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(tree, compiled(*placed))

  return run


def _put(leaf: Any, sharding: NamedSharding) -> Any:
  if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
    return leaf  # not moved
  return jax.device_put(leaf, sharding)


def _is_spec(part: Any) -> bool:
  return part is None or isinstance(part, PartitionSpec)


# -- the function --------------------------------------------------------------------------------
def sharded_jit(
  fun: Callable[..., Any],
  in_parts: Any,
  out_parts: Any,
  num_partitions: int | None = None,
  local_in_parts: Any = None,
  local_out_parts: Any = None,
  local_num_partitions: int | None = None,
  static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
  """Like `jax.jit`, with arguments and results split over several devices.

  The number of devices is that of the partitions: of `num_partitions`, of the specs, and of the
  constraints inside, which must all agree. They are the first local ones.

  Args:
    fun: a function of arrays and pytrees of arrays.
    in_parts: how the arguments are split: a `PartitionSpec` for all, None (replicated), or a tuple
      with an entry an argument, each a pytree prefix of it. Without the static arguments.
    out_parts: the same for the results.
    num_partitions: the number of devices, where nothing else says it.
    local_in_parts: with several processes, how the part of the arguments that this process passes
      is split over its own devices.
    local_out_parts: the same for the part of the results that it gets.
    local_num_partitions: the number of devices of this process, where nothing else says it.
    static_argnums: positions of arguments that are hashable values, not arrays.

  Returns:
    The function. Its results are jax.Arrays with the shardings that `out_parts` means.

  Raises:
    ValueError: partitions that disagree with each other, the arrays or the devices.
    NotImplementedError: a call with keyword arguments.
  """
  static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
  local = _Local(local_in_parts, local_out_parts, local_num_partitions)
  split = _ShardedJit(fun, in_parts, out_parts, num_partitions, local, static)

  @functools.wraps(fun)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    return split(*args, **kwargs)

  return wrapped
