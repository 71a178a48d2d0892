# SPDX-License-Identifier: Apache-2.0
"""`callgate.tap`: streams values out of compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate, _part
from callgate._call import shapes
from callgate._core import dtypes, failures, masked, options, spellings
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._jax import refs, tracing
from callgate._sharding import rules
from callgate._tap import consumers, delivery, kinds, primitive
from callgate._tap import target as _target
from callgate._tap.channel import Channel, tap_of
from callgate._tap.site import Arrays, TapSite, Transforms
from callgate._tap.target import DEFAULT, Tap

_MOST = 2**31 - 1  # the largest int32
Effect = Literal["io", "dataflow"]
Role = Literal["primal", "tangent", "cotangent"]
T = TypeVar("T")


@spellings.answered
def tap(
  value: T,
  to: Callable[..., Any] | Channel | str,
  *,
  name: str | None = None,
  where: Any = None,
  every: int | None = None,
  ordered: bool = False,
  effect: Effect = "io",
  roles: Sequence[Role] = ("primal",),
  logical_shape: Any = None,
  sharding: str | Callable[..., Any] = "shard",
  replicas: Literal["once", "all"] = "once",
  on_device: bool = False,
  kind: kinds.Kind | None = None,
) -> T:
  """Sends a value out of a compiled program while it runs, and returns the value.

  The program copies the value into the channel's ring buffer and continues. Consumers run on the
  channel's thread.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  seen = []

  @jax.jit
  def norm(x):
    return cg.tap(jnp.sqrt(jnp.sum(x**2)), seen.append, name="norm")

  norm(jnp.array([3.0, 4.0]))
  cg.barrier()
  assert seen == [5.0]
  ```

  Under `jax.vmap` consumers get each lane separately, with its index in `info.lane`. Two cases send
  a value again, with `info.repeated` set: the second forward pass of `jax.checkpoint`, and a
  `while_loop` that `jax.linearize` runs again for each tangent.

  Args:
    value: a pytree of arrays. For a `jax.Ref` the tap sends its contents.
    to: a function `fn(value)` or `fn(value, info)`, a channel, or a channel's name. The function
      runs on callgate's thread; it gets NumPy arrays that it may keep, and a `TapInfo`.
    name: the name of the records. Default: the name of the function or of the channel.
    where: a traced bool; if it is False, the tap sends nothing. Under `jax.vmap` each lane has its
      own.
    every: sends one of every `every` executions of this call site, beginning with the first. With
      `where` it counts only executions for which `where` is True.
    ordered: keeps the program order of all ordered taps and gates on a device, also from one
      program to the next. Without it records arrive in the order of execution.
    effect: "io": the tap runs exactly once per execution and is never removed. "dataflow": it runs
      only if the program uses the returned value; it has no JAX effect and costs no dispatch time.
    roles: the values to send under differentiation: "primal", optionally with "tangent",
      "cotangent" or both.
    logical_shape: the sizes of the part of a padded array that consumers get. It is a tuple for a
      single array, else a pytree like `value` of tuples (or None). Sizes are integers and may be
      traced. A traced size that is negative or too large loses the record, and `barrier()` raises
      an error.
    sharding: the records of a program over several devices. "shard" sends one record for each
      device's part, with `info.shard`. "gather" sends one record of the whole value. A rule such as
      "i [j]", with one term for each leaf, gathers the dimensions in brackets only. A function of
      the mesh and the leaves (ShapeDtypeStructs with shardings) returns one of these, or a
      PartitionSpec for each leaf; dimensions that a PartitionSpec doesn't split are gathered.
    replicas: "once": one of the devices with copies of the same part sends it. "all": each does.
    on_device: consumers get jax.Arrays on the program's device, and may compute with them there. On
      a GPU the program's stream copies the value into memory of callgate, without the host and
      without a wait. The arrays own that memory. Waiting records take up to the channel's
      `capacity` of this memory; the records that the stream has yet to reach come on top. The
      consumers' thread runs JAX on the device, so nothing that runs there may wait for that thread.
      On the CPU, and with `callgate.config(engine="jax")`, callgate makes the arrays from the
      record's copy. Channels with `batch=` or native sinks reject such records. XLA excludes these
      taps from its CUDA graphs.
    kind: how dashboards and trackers show the value. "image": each leaf is `[height, width]`,
      optionally with 1, 3 or 4 channels, or a batch of these; uint8, or floats from 0 to 1. "text":
      the value is a `str`, or `uint8[bytes]` of UTF-8 with optional zeros at the end, or a tuple of
      a format string and its values, such as `("{} at {rate:.2g}", loss, {"rate": rate})`; the last
      value may be a dict of named values. Python consumers get a `str`. With a kind,
      sharding="shard" acts as "gather".

  Returns:
    The value. Use it in the place of the argument with effect="dataflow" and with `roles`.

  Raises:
    GateDefinitionError: an argument is wrong.
  """
  failures.raise_deferred()
  consumers.check_not_forked()
  target = _target_of(to)
  if name is None:
    own = getattr(to, "name" if isinstance(to, Channel) else "__name__", None)
    name = to if isinstance(to, str) else own or type(to).__name__
  name = str(options.name("tap", name))
  label = f"tap '{name}'"
  options.choice(label, "effect", effect, get_args(Effect), what="'io' or 'dataflow'")
  options.booleans(label, ordered=ordered, on_device=on_device)
  if ordered and effect == "dataflow":
    why = "False with effect='dataflow', whose records follow the data"
    options.refuse(label, "ordered", why, ordered)
  kinds.option(label, kind, effect, on_device)
  if every is not None:
    options.count(label, "every", every, least=1, most=_MOST, what="a positive int")
  given: Any = roles
  if not (
    isinstance(given, (list, tuple, set, frozenset))
    and all(
      isinstance(role, str) and role in delivery.ROLES for role in cast("Iterable[Any]", given)
    )
    and "primal" in given
  ):
    options.refuse(label, "roles", "'primal' and any of 'tangent' and 'cotangent'", roles)
  named = sharding in rules.BY_NAME if isinstance(sharding, str) else callable(sharding)
  # A rule that is a single name would mean the same as "shard". So such a word is a misspelling.
  if not named and (not isinstance(sharding, str) or not sharding or sharding.isidentifier()):
    expected = "'shard', 'gather' or a rule such as 'i [j]' or a function"
    options.refuse(label, "sharding", expected, sharding)
  options.choice(label, "replicas", replicas, ("once", "all"), what="'once' or 'all'")
  given_value, fields = value, None
  if kind is not None:
    sharding = "gather" if isinstance(sharding, str) and sharding == "shard" else sharding
  if kind == "text":
    sent, fields = kinds.split_text(label, value)
    value = cast("T", sent)
  leaves, tree = jax.tree.flatten(value)
  arrays = [_as_array(label, refs.read(leaf), index) for index, leaf in enumerate(leaves)]
  if kind is not None:
    kinds.check(label, kind, arrays, fields)
  carried = [dtypes.carried(x, keys=True) for x in arrays]
  operands = [x for x, _ in carried]
  if not operands and effect == "dataflow":
    options.refuse(
      label, "value", "an array, since a 'dataflow' tap without one is never used", value
    )
  if isinstance(sharding, str) and not named:  # raises if the rule doesn't fit
    rules.parse(label, sharding, tuple(x.shape for x in operands), (), tap=True)
  sizes = logical_sizes(label, logical_shape, value, arrays)
  extra = [size for _, size in sizes]
  extra += [] if where is None else [shapes.predicate(label, "where", where)]
  site = TapSite(
    tree=tree, name=name, effect="ordered" if ordered else effect, every=int(every or 1),
    where=where is not None, roles=tuple(roles), dtypes=tuple(own for _, own in carried),
    logical=tuple(index for index, _ in sizes), sharding=sharding, replicas=replicas,
    on_device=on_device, kind=kind, fields=fields, pmapped=tracing.in_pmap(),
  )  # fmt: skip
  results = bind(target, site, operands, extra)
  if (effect == "io" and "cotangent" not in roles) or kind == "text":
    return given_value
  return jax.tree.unflatten(tree, map(uncarried, arrays, results))


def bind(
  target: Tap, site: TapSite, operands: Arrays, extra: Arrays = (), transforms: Transforms = ()
) -> Arrays:
  """Binds a tap; returns its values and the untapped arrays, for use in the rest of the trace.

  `extra` are the sizes, the predicate and the untapped arrays (see `TapSite`). `transforms` are the
  transformations that the tap has already met. Raises GateDefinitionError for an array of a dtype
  that no Python consumer could get.
  """
  for index, operand in enumerate(operands):
    dtypes.check_rank(f"tap '{site.name}': leaf {index}", jnp.shape(operand))
  params: dict[str, Any] = {"tap": target, "levels": (), "transforms": transforms}
  params |= {"role": "primal", "repeated": False}
  results = primitive.tap_p.bind(*operands, *extra, site=site, **params)
  if site.effect == "dataflow":
    return results
  if "cotangent" not in site.roles and not site.transposed:
    return operands
  plain = dataclasses.replace(site, where=False)
  sizes = extra[: len(site.logical)]
  return primitive.cotangent_p.bind(*operands, *sizes, site=plain, **params)[: len(operands)]


def _target_of(to: Any) -> Tap:
  if isinstance(to, Channel):
    return tap_of(to)
  if callable(to):
    delivery.check_takes_values("tap: to: expected a function", to)
    return _target.of_function(to)
  if not isinstance(to, str):
    options.refuse("tap", "to", "a function, a channel or a channel's name", to)
  if not to or "\n" in to or to == DEFAULT:
    options.refuse("tap", "to", "a channel's name", to)
  found = _target.of_channel(options.text("tap", "to", to))
  _part.tell("channel named", to)
  return found


def _as_array(label: str, leaf: Any, index: int) -> Any:
  try:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
  except (TypeError, ValueError, OverflowError) as error:
    got = masked.shown(leaf)
    raise GateDefinitionError(f"{label}: leaf {index}: expected an array, got {got}") from error


def logical_sizes(
  label: str, logical_shape: Any, value: Any, arrays: Sequence[Any]
) -> list[tuple[int, Any]]:
  """Returns (leaf index, vector of sizes) for each leaf that has logical sizes."""
  if logical_shape is None:
    return []
  tree = jax.tree.structure(value)
  if tree != jax.tree.structure(0):
    try:
      shapes: list[Any] = tree.flatten_up_to(logical_shape)
    except (TypeError, ValueError):  # containers of other types than those of the value
      shapes = jax.tree.leaves(logical_shape, is_leaf=lambda x: x is None or isinstance(x, tuple))
  elif isinstance(logical_shape, (tuple, list)):
    shapes = [logical_shape]
  else:
    options.refuse(label, "logical_shape", "a tuple of sizes", logical_shape)
  if len(shapes) != len(arrays):
    expected = f"expected a tuple or None for each of {len(arrays)} leaves, got {len(shapes)}"
    raise GateDefinitionError(f"{label}: logical_shape: {expected}")
  sizes: list[tuple[int, Any]] = []
  for index, (shape, array) in enumerate(zip(shapes, arrays, strict=True)):
    if shape is None:
      continue
    if not isinstance(shape, (tuple, list)):
      options.refuse(label, "logical_shape", f"a tuple or None for leaf {index}", shape)
    leaf = f"{label}: logical_shape of leaf {index}"
    if len(shape) != array.ndim:
      of = dtypes.type_text(array.dtype, array.shape)
      raise GateDefinitionError(f"{leaf}: expected {array.ndim} sizes for {of}, got {len(shape)}")
    if not all(size is None or _is_size(size) for size in shape):
      options.refuse(label, "logical_shape", "integers, traced or not", shape)
    for axis, (size, extent) in enumerate(zip(shape, array.shape, strict=True)):
      known = isinstance(size, (int, np.integer)) and isinstance(extent, int)
      if known and not 0 <= size <= extent:
        expected = f"expected a size from 0 to {extent}, got {size}"
        raise GateDefinitionError(f"{leaf}, dimension {axis}: {expected}")
    if shape:
      pairs = zip(shape, array.shape, strict=True)
      full = [_as_size(have if want is None else want) for want, have in pairs]
      sizes.append((index, jnp.stack(full)))
  return sizes


def _as_size(size: Any) -> Any:
  """Converts to int32; a value out of int32's range becomes an invalid size, and stays invalid."""
  if not isinstance(size, int):
    size = jnp.asarray(size)
    limits = jnp.iinfo(size.dtype)
    if limits.max > _MOST:
      size = jnp.clip(size, max(int(limits.min), -_MOST - 1), _MOST)
  return jnp.asarray(size, jnp.int32)


def _is_size(value: Any) -> bool:
  if is_open(value):
    return True
  if hasattr(value, "dtype"):
    return bool(jnp.issubdtype(value.dtype, jnp.integer)) and jnp.shape(value) == ()
  return isinstance(value, int) and not isinstance(value, bool)


def uncarried(array: Any, result: Any) -> Any:
  """Converts a tap's result back to the dtype of the user's array: the inverse of `carried`."""
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(result, impl=jax.random.key_impl(array))
  return result if result.dtype == array.dtype else result.astype(array.dtype)


def channel_stats() -> dict[str, dict[str, int]]:
  """Returns the counters of every channel of the process by name; see `Channel.stats`.

  ```python
  import callgate as cg, jax

  with cg.channel("stats.loss", to=print):
    jax.jit(lambda x: cg.tap(x, "stats.loss"))(2.0)
    cg.barrier()
    assert cg.channel_stats()["stats.loss"]["delivered"] == 1
  ```

  "default" is the channel of taps to functions. If no channel of a name is open, the counters are
  those of the records that wait for one.
  """
  return _callgate.channel_stats()
