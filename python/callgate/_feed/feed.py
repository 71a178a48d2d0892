"""Feeds: host iterators that compiled JAX programs read from.

`Feed.next()` is an ordered gate that takes the next item from a producer's queue. Its function
holds the producer, whose thread holds neither: once no Feed and no program is left that could take
an item, the function dies and its finalizer ends the thread. `next()` has no arguments for batching
to see, so a primitive of its own knows the axes that it is mapped over.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.interpreters import batching, mlir

from callgate import _callgate
from callgate._call import jax_engine, primitive
from callgate._call.site import BoundCall, CallSite
from callgate._core import effects, errors, failures, options, registry
from callgate._feed import items
from callgate._feed import producer as _producer
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._runtime import config


class _Missing:
  """Stands for an option that was not given, where None is an item like any other."""

  def __repr__(self) -> str:
    return "<none>"


_MISSING = _Missing()


class Feed:
  """A host iterator as a source of items for compiled programs; made by `callgate.feed`.

  A context manager, which closes the feed at the end of its block.

  Attributes:
    name: what messages and threads call it.
    shape: the items' types, as a pytree of ShapeDtypeStructs.
    prefetch: how many items the iterator may be ahead of the programs.
  """

  def __init__(
    self, iterable: Iterable[Any], prefetch: int, shape: Any, default: Any, name: str | None
  ) -> None:
    # An unnamed one is called as the generator function or the iterable's class.
    named: Any = iterable if hasattr(iterable, "__qualname__") else type(iterable)
    self.name = name = options.name("feed", name) or registry.unique_name(named)
    limits: Any = {"least": 1, "most": 2**31 - 1, "what": "an integer of 1 or more"}
    self.prefetch = options.count(f"feed '{name}'", "prefetch", prefetch, **limits)
    types = items.from_structs(name, shape) if shape is not None else None
    self._producer = _producer.Producer(name, _iterator(name, iterable), self.prefetch)
    try:
      if types is None and self._producer.wait_for_first():
        types = items.from_item(name, self._producer.first)
      elif types is None and default is _MISSING:
        empty = f"feed '{name}': the iterable is empty, so the items' types are not known"
        raise errors.GateDefinitionError(f"{empty}; expected an item, shape= or default=")
      types = types or items.from_item(name, default, "default")
      structs = tuple(jax.ShapeDtypeStruct(*one) for one in types.types)
      self._tree = types.tree
      self.shape = jax.tree.unflatten(types.tree, structs)
      take = functools.partial(_take, self._producer, len(structs[0].shape))
      weakref.finalize(take, self._producer.release).atexit = False
      made = GateOptions(out=structs, name=name, effect="ordered", style="inplace")
      self._gate = _FeedGate(take, made)
      nothing, flat = jax.tree.structure(((), {})), jax.tree.structure(structs)
      self._site = CallSite(nothing, flat, static=(), results=types.types)
      after = None if default is _MISSING else types.broadcast(default)
      self._producer.serve(types.convert, after)
    except BaseException:  # Ctrl-C while the first item is made, too
      self._producer.release()
      raise

  def __repr__(self) -> str:
    return f"<feed '{self.name}'>"

  def next(self) -> Any:
    """The next item, inside or outside compiled code: a pytree of jax.Arrays as `shape` says.

    Each execution takes the next item, in program order, also across calls of the program; under
    `jax.vmap` each lane one of its own, in lane order, whether or not anything else is mapped.
    Items are constants to derivatives. Over several devices one takes the item for all
    (docs/feeds.md).

    Raises:
      EndOfFeed: there are no more items, and no default.
      GateError: the feed is closed, or was made in another process.
      BaseException: what the iterator raised in the place of this item. All of these fail the
        program (`jax.errors.JaxRuntimeError`), and are raised as themselves by `callgate.errors()`.
    """
    failures.raise_deferred()
    self._producer.check()
    flat = next_p.bind(gate=self._gate, site=self._site, lead=(), engine=config.engine())
    return jax.tree.unflatten(self._tree, flat)

  def stats(self) -> dict[str, int]:
    """What has happened so far.

    "produced": items that the iterator gave. "served": that programs took, defaults included.
    "waited": times that a program had to wait for one. "queued": items that wait in the queue.
    """
    return self._producer.stats()

  def close(self, timeout: float = 5.0) -> bool:
    """Stops the iterator's thread; a program that asks for an item from here on fails.

    Waits `timeout` seconds at most for an iterator that is busy, and returns whether the thread has
    ended. If not, it ends when its iterator returns.
    """
    seconds = options.seconds(f"feed '{self.name}'", "timeout", timeout, zero=True)
    return self._producer.close(seconds)

  def __enter__(self) -> Feed:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def feed(
  iterable: Iterable[Any], *, prefetch: int = 2, shape: Any = None, default: Any = _MISSING,
  name: str | None = None,
) -> Feed:  # fmt: skip
  """A `Feed`: compiled programs read a host iterator, which runs ahead on a thread of its own.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  with cg.feed(np.float32(i) for i in range(10)) as numbers:
    total = jax.jit(lambda: jax.lax.fori_loop(0, 10, lambda i, s: s + numbers.next(), 0.0))()
    assert total == 45
  ```

  Args:
    iterable: gives the items: pytrees of NumPy or jax arrays, torch tensors or Python scalars, all
      of the same structure, shapes and dtypes. Items are checked, and never cast; Python scalars
      get JAX's default dtypes.
    prefetch: how many items the iterator may be ahead of the programs.
    shape: the item's types, a pytree of anything with `.shape` and `.dtype`. None: those of the
      first item, which is waited for here.
    default: an item, or a prefix of one that broadcasts to it, to serve for ever after the last
      one. Without it the end of the data is an error, `EndOfFeed`.
    name: for messages and threads. Default: the iterable's qualified name, numbered if not alone.

  Once a program on a CUDA GPU has asked for an item, the feed's thread copies the next ones there
  ahead of it, as far as `prefetch` goes: each takes its size in the GPU's memory and in pinned
  memory. Of several GPUs the one that asked last gets them (docs/gpu.md).

  Raises:
    GateDefinitionError: an option is wrong, or there is no item to take the types from.
    ResultError: the first item holds something other than arrays and numbers.
    ValueError: the name is taken by another live feed or gate.
    BaseException: what the iterator raised in the place of its first item, if `shape` is None.
  """
  return Feed(iterable, prefetch, shape, default, name)


class _FeedGate(Gate):
  native = True  # NumPy's arrays on the host, the GPU's own in a program for CUDA


def _take(producer: _producer.Producer, rank: int, outs: Sequence[Any]) -> None:
  """A feed's gate: writes the next item, or one for each lane, into the results.

  `rank` is that of an item's first leaf: what comes before are batch axes.
  """
  batch = outs[0].ndim - rank
  lanes = math.prod(outs[0].shape[:batch])
  if place := _callgate.device_call():  # the results are Buffers, and items on their way there
    for lane in range(lanes):
      producer.take_uploaded(place[1]).give(outs, lane, lanes)
    return
  rows = [out.reshape(lanes, *out.shape[batch:]) for out in outs]
  for lane in range(lanes):
    for row, array in zip(rows, producer.take(), strict=True):
      row[lane, ...] = array


# -- checks ----------------------------------------------------------------------------------------
def _iterator(name: str, iterable: Any) -> Iterator[Any]:
  if isinstance(iterable, str):
    options.refuse(f"feed '{name}'", "iterable", "an iterable of items", iterable)
  try:
    return iter(iterable)
  except TypeError as error:
    if hasattr(iterable, "__iter__") and getattr(iterable, "ndim", None) != 0:
      raise  # its own
    got = type(iterable).__name__ + ("; call the function" if callable(iterable) else "")
    expected = f"expected an iterable of items, got {got}"
    raise errors.GateDefinitionError(f"feed '{name}': iterable: {expected}") from error


# -- the primitive ---------------------------------------------------------------------------------
# Parameters: gate and site, as the gate's primitive has them; lead, the sizes of the axes that the
# call is mapped over, outermost first; engine, what runs it.
next_p = tracing.Primitive("feed_next")
next_p.multiple_results = True
tracing.define_impl(next_p)


@next_p.def_effectful_abstract_eval
def _abstract_eval(*, gate: Gate, site: CallSite, lead: tuple[int, ...], engine: str) -> Any:
  effect = tracing.ordered_io_effect if engine == "jax" else effects.ORDERED_GATE_EFFECT
  avals = (tracing.shaped_array((*lead, *shape), dtype, ()) for shape, dtype in site.results)
  axes = tracing.manual_axes()  # in a jax.shard_map each device takes items for itself
  return tuple(tracing.varying_aval(aval, axes) for aval in avals), frozenset({effect})


def _batch(axis_data: Any, _: Any, dims: Any, *, lead: tuple[int, ...], **params: Any) -> Any:
  results = next_p.bind(lead=(axis_data.size, *lead), **params)
  return results, [0] * len(results)


batching.fancy_primitive_batchers[next_p] = _batch


def _lower(
  context: Any, *, gate: Gate, site: CallSite, lead: tuple[int, ...], engine: str
) -> Sequence[Any]:
  results = tuple(((*lead, *shape), dtype) for shape, dtype in site.results)
  site = dataclasses.replace(site, results=results)
  if engine != "jax":
    return primitive.lower(context, call=BoundCall(gate, site))
  call = mlir.lower_fun(lambda: jax_engine.bind(gate, site, ()), multiple_results=True)
  return call(context)


# Not cached, as the gates' own rule: its source line is part of the program.
mlir.register_lowering(next_p, _lower, cacheable=False)
