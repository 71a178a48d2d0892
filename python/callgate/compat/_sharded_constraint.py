"""`with_sharding_constraint` of `compat.sharded_jit`: a primitive that its function gives meaning.

What it means depends on the program around, so that it is known when that is lowered: the devices
of the program, or none of its own inside `jax.pmap` and `jax.shard_map`. JAX calls the rules, on
the thread that traces or lowers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from callgate import _compat
from callgate.compat._sharded_parts import (
  PartitionSpec,
  Parts,
  check_ranks,
  flat_parts,
  sharding_of,
)

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
  leaves, tree = jax.tree.flatten(x)
  flat = flat_parts(parts, x, "with_sharding_constraint")
  check_ranks(flat, [jax.typeof(leaf) for leaf in leaves], "with_sharding_constraint")
  return jax.tree.unflatten(
    tree, [_constraint_p.bind(leaf, parts=part) for leaf, part in zip(leaves, flat, strict=True)]
  )


def counts_inside(jaxpr: Any) -> Iterator[tuple[int, str]]:
  """How many partitions the constraints and the nested sharded_jit functions of a program ask for.

  Args:
    jaxpr: the program; what is inside its loops, branches and calls counts, too.

  Yields:
    The number, and who asks for it.
  """
  for eqn in jaxpr.eqns:
    if eqn.primitive is _constraint_p:
      parts = eqn.params["parts"]
      if parts is not None:
        yield math.prod(parts), f"with_sharding_constraint with partitions={parts}"
    for sharding in (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())):
      if isinstance(sharding, NamedSharding):
        yield sharding.num_devices, f"the nested {eqn.params.get('name', 'jit')}"
    for inner in _compat.subjaxprs(eqn):
      yield from counts_inside(getattr(inner, "jaxpr", inner))


# -- the primitive's rules -------------------------------------------------------------------------
def _outside(*_: Any, parts: Parts) -> Any:
  raise NotImplementedError(
    "with_sharding_constraint() should only be called inside sharded_jit(): got a constraint with "
    f"partitions={parts}"
  )


def _lower(context: Any, x: Any, *, parts: Parts) -> Sequence[Any]:
  devices = _compat.program_devices(context)
  if devices is None:  # each device has a part of its own already: inside pmap or shard_map
    return [x]
  if parts is not None and math.prod(parts) != len(devices):
    _outside(parts=parts)  # sharded_jit has checked its own constraints
  if len(devices) == 1:
    return [x]
  sharding = sharding_of(tuple(devices), parts)
  constrain = mlir.lower_fun(
    lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
  )
  return constrain(context, x)


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
