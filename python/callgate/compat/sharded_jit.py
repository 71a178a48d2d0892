"""`jax.experimental.sharded_jit` of 2020-21: a jit whose arguments and results are split by counts.

```python
import jax.numpy as jnp
from callgate.compat.sharded_jit import PartitionSpec, sharded_jit

add = sharded_jit(lambda x, y: x + y, in_parts=(PartitionSpec(1), None), out_parts=PartitionSpec(1))
assert add(jnp.ones(4), jnp.ones(4)).tolist() == [2.0] * 4
```

It ran on TPUs, then on GPUs; this one is `jax.jit` with shardings underneath, so it runs on every
platform. A function is traced and compiled once for each kind of arguments, on the thread that
first calls it with them; any thread may call.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from callgate._jax import tracing
from callgate._jax.tracing import jaxpr_as_fun
from callgate.compat._sharded_jit.local import (
  Part,
  Stated,
  check_local,
  devices_of,
  is_shared,
  part_of,
  put,
)
from callgate.compat._sharded_jit.parts import (
  PartitionSpec,
  Parts,
  check_divides,
  check_ranks,
  counts_inside,
  flat_parts,
  is_count,
  with_sharding_constraint,
)

__all__ = ["PartitionSpec", "sharded_jit", "with_sharding_constraint"]


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
  constraints inside, which must all agree. They are the first ones of this process. Where there are
  several processes, and more partitions than a process has devices, they are all devices of all
  processes; then each process passes its part of every argument and gets its part of every result:
  arrays on its own devices. The function itself sees the whole arrays. In a program around (`jit`,
  `grad`, `vmap`, loops) arguments and results are whole there, too.

  Args:
    fun: a function of arrays and pytrees of arrays.
    in_parts: how the arguments are split: a `PartitionSpec` for all, None (replicated), or a tuple
      with an entry an argument, each a pytree prefix of it. Without the static arguments. A spec
      has a count for each dimension of its arrays.
    out_parts: the same for the results.
    num_partitions: the number of devices, where nothing else says it.
    local_in_parts: with several processes, how the part of the arguments that a process passes
      is split over its own devices. It follows from the devices, and is checked if given.
    local_out_parts: the same for the part of the results that it gets.
    local_num_partitions: the number of devices of each process. Across processes it must be said
      where all arguments and results are replicated.
    static_argnums: positions of arguments that are hashable values, not arrays.

  Returns:
    The function. Its results are `jax.Array`s with the shapes and types that `fun` gives them,
    split as `out_parts` says; across processes, the process's tiles of them.

  Raises:
    ValueError: here or in a call: partitions that disagree with each other, with the arrays or with
      the devices; too few arguments for `static_argnums`, or a static one that can't be hashed.
    NotImplementedError: in a call with keyword arguments.
  """
  for name, count in (
    ("num_partitions", num_partitions),
    ("local_num_partitions", local_num_partitions),
  ):
    if count is not None and not is_count(count):
      raise ValueError(f"sharded_jit: {name}: expected an integer of at least 1, got {count!r}")
  static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
  local = Stated(_entries(local_in_parts), local_out_parts, local_num_partitions, "local_")
  split = _ShardedJit(fun, Stated(_entries(in_parts), out_parts, num_partitions), local, static)

  @functools.wraps(fun)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if kwargs:
      raise NotImplementedError(
        f"sharded_jit over kwargs not yet supported: got {', '.join(kwargs)}; pass them by position"
      )
    return split.call(args)

  return wrapped


def _entries(parts: Any) -> Any:
  """Parts of arguments: a list of them is a tuple, as the arguments are."""
  return tuple(parts) if isinstance(parts, list) else parts


class _ShardedJit:
  """What one call of `sharded_jit` made: the function, its parts and its programs."""

  def __init__(
    self, fun: Callable[..., Any], whole: Stated, local: Stated, static: tuple[int, ...]
  ) -> None:
    self.fun, self.whole, self.local, self.static = fun, whole, local, static
    self.name = getattr(fun, "__name__", "sharded_jit")
    self._programs: dict[Hashable, Callable[[list[Any]], Any]] = {}
    self._lock = threading.Lock()

  def call(self, args: tuple[Any, ...]) -> Any:
    """The function of positional arguments."""
    fixed = self._fixed(args)
    given = tuple(arg for i, arg in enumerate(args) if i not in fixed)
    leaves, tree = jax.tree.flatten(given)
    types = [jax.typeof(leaf) for leaf in leaves]
    # In a program around, arrays are whole even across processes, and its mesh may decide.
    inside = any(isinstance(leaf, Tracer) for leaf in leaves)
    static = tuple((i, type(value), value) for i, value in sorted(fixed.items()))
    key = (tree, *map(str, types), static, inside, tracing.trace_key())
    with self._lock:
      run = self._programs.get(key)
    if run is None:
      run, lasting = _Program(self, given, fixed, inside).runner(types)
      if lasting:
        with self._lock:
          self._programs[key] = run
    return run(leaves)

  def _fixed(self, args: tuple[Any, ...]) -> dict[int, Any]:
    """The static arguments by position."""
    if not all(-len(args) <= i < len(args) for i in self.static):
      raise ValueError(
        f"sharded_jit: static_argnums={self.static}, but {self.name} was called with only "
        f"{len(args)} positional arguments"
      )
    fixed = {i % len(args): args[i] for i in self.static}
    for i, value in fixed.items():
      try:
        hash(value)
      except TypeError as error:
        raise ValueError(
          f"sharded_jit: static argument {i} of {self.name}: expected a hashable value, got "
          f"{value!r}"
        ) from error
    return fixed


@dataclasses.dataclass(frozen=True)
class _Program:
  """One program of a sharded_jit function: for arguments of certain shapes and types."""

  split: _ShardedJit
  given: tuple[Any, ...]
  fixed: dict[int, Any]
  inside: bool

  def runner(self, types: Sequence[Any]) -> tuple[Callable[[list[Any]], Any], bool]:
    """Traces the function for arguments of `types`.

    Returns what runs it on flat arguments, and whether that lasts: not where the function closes
    over a value that is being traced.
    """
    stated = self.split.whole
    parts = flat_parts(stated.in_parts, self.given, "in_parts")
    check_ranks(parts, types, "in_parts")
    shapes = self._whole_shapes(parts, types)
    check_divides(parts, shapes, "in_parts")
    closed, info = self._traced(shapes, types)
    out_parts = flat_parts(stated.out_parts, info, "out_parts")
    results = jax.tree.leaves(info)
    check_ranks(out_parts, results, "out_parts")
    check_divides(out_parts, [result.shape for result in results], "out_parts")
    count = self._count(closed.jaxpr)
    lasting = not any(isinstance(const, Tracer) for const in closed.consts)
    if count is None or tracing.in_manual_region():
      # Replicated on as many devices as the program around has; parts of parts aren't split again.
      return self._runner(closed, info), lasting
    devices = devices_of(count, self.split.local, stated.split)
    ins, outs = [part_of(devices, p) for p in parts], [part_of(devices, p) for p in out_parts]
    self._check_local(ins, outs, info)
    shared = is_shared(devices)
    if shared and not self.inside and not lasting:
      raise ValueError(
        f"sharded_jit across processes: expected {self.split.name} to close over values, got one "
        "that is being traced: pass it as an argument, or transform inside of sharded_jit"
      )
    return self._runner(closed, info, ins, outs, shared), lasting

  def _whole_shapes(self, parts: list[Parts], types: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shapes that the function sees."""
    shapes = [t.shape for t in types]
    stated = self.split.whole
    if stated.said is None or self.inside:
      return shapes  # nothing is split, or nothing is a part
    devices = devices_of(stated.said, self.split.local, stated.split)
    if not is_shared(devices):
      return shapes
    return [part_of(devices, p).whole_shape(s) for p, s in zip(parts, shapes, strict=True)]

  def _traced(self, shapes: list[tuple[int, ...]], types: Sequence[Any]) -> tuple[Any, Any]:
    """The program and the tree of its results; what the function closes over are constants."""
    fixed, fun, tree = self.fixed, self.split.fun, jax.tree.structure(self.given)
    total = len(self.given) + len(fixed)

    def flat(*leaves: Any) -> Any:
      rest = iter(jax.tree.unflatten(tree, leaves))
      return fun(*(fixed[i] if i in fixed else next(rest) for i in range(total)))

    flat.__name__ = self.split.name
    arguments = [
      jax.ShapeDtypeStruct(shape, t.dtype, weak_type=t.weak_type)
      for shape, t in zip(shapes, types, strict=True)
    ]
    return jax.make_jaxpr(flat, return_shape=True)(*arguments)

  def _count(self, jaxpr: Any) -> int | None:
    """The number of partitions; None where nothing says it and the program around may."""
    count = self.split.whole.said
    for inside, who in counts_inside(jaxpr):
      if count is not None and inside != count:
        raise ValueError(
          f"{who} (total partitions: {inside}) doesn't match expected number of partitions: "
          f"{count}. If these partitions look right, check outer sharded_jit and/or other "
          "with_sharding_constraint calls."
        )
      count = inside
    return 1 if count is None and self.split.local.said is not None else count

  def _check_local(self, ins: list[Part], outs: list[Part], results: Any) -> None:
    local = self.split.local
    for parts, said, tree, what in (
      (ins, local.in_parts, self.given, "local_in_parts"),
      (outs, local.out_parts, results, "local_out_parts"),
    ):
      if said is not None:
        check_local(parts, flat_parts(said, tree, what), what)

  def _runner(
    self,
    closed: Any,
    info: Any,
    ins: Sequence[Part] | None = None,
    outs: Sequence[Part] = (),
    shared: bool = False,
  ) -> Callable[[list[Any]], Any]:
    """What runs the traced program on flat arguments; it is not traced again.

    `info` is the tree of its results; `ins` and `outs` say how arrays are split, and None leaves
    them where they are; `shared` whether the devices are of several processes.
    """
    program = jaxpr_as_fun(closed)
    tree, inside = jax.tree.structure(info), self.inside

    def flat(*leaves: Any) -> list[Any]:
      return program(*leaves)

    flat.__name__ = flat.__qualname__ = self.split.name  # in profiles and texts
    if ins is None:
      compiled = jax.jit(flat)
      return lambda leaves: jax.tree.unflatten(tree, compiled(*leaves))
    compiled = jax.jit(
      flat,
      in_shardings=tuple(part.whole for part in ins),
      out_shardings=[part.whole for part in outs],
    )

    def place(leaf: Any, part: Part) -> Any:
      if inside and (shared or isinstance(leaf, Tracer)):
        return leaf
      return part.to_program(leaf) if shared else put(leaf, part.whole)

    def run(leaves: list[Any]) -> Any:
      results = compiled(*map(place, leaves, ins))
      if shared and not inside:
        results = [part.to_process(whole) for part, whole in zip(outs, results, strict=True)]
      return jax.tree.unflatten(tree, results)

    return run
