"""Feeds: host iterators that compiled JAX programs read from.

`feed` makes one. A producer thread (`producer.py`) iterates ahead; `Feed.next()` is an ordered gate
that takes the next item from its queue, on XLA's thread, and waits only when the queue is empty.

The gate's function holds the producer, and the producer's thread holds neither: once no Feed and no
program is left that could take an item, the function dies and its finalizer ends the thread.

`next()` has no arguments, so batching could not see it by them: a primitive of its own knows the
axes that it is mapped over, and its call then takes an item for each lane.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.interpreters import batching, mlir

from callgate import _callgate
from callgate._call import jax_engine, primitive
from callgate._call.site import BoundCall, CallSite
from callgate._core import effects, options, registry
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._feed import items
from callgate._feed import producer as _producer
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._jax.tracing import Primitive
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
    whole = "an integer of 1 or more"
    limits = {"least": 1, "most": 2**31 - 1}
    self.prefetch = options.count(f"feed '{name}'", "prefetch", prefetch, what=whole, **limits)
    types = items.from_structs(name, shape) if shape is not None else None
    self._producer = _producer.Producer(name, _iterator(name, iterable), self.prefetch)
    try:
      if types is not None:
        pass
      elif self._producer.wait_for_first():
        types = items.from_item(name, self._producer.first)
      elif default is not _MISSING:
        types = items.from_item(name, default, "default")
      else:
        raise GateDefinitionError(
          f"feed '{name}': the iterable is empty, so the items' types are not known; expected an "
          "item, shape= or default="
        )
      structs = tuple(jax.ShapeDtypeStruct(*one) for one in types.types)
      self._tree = types.tree
      self.shape = jax.tree.unflatten(types.tree, structs)
      take = _Take(self._producer, len(structs[0].shape))
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

    Each execution takes the next item, in program order, also across calls of the program. Under
    `jax.vmap` each lane takes an item of its own, in lane order, whether or not anything else in
    the function is mapped. Items are constants to derivatives. In a
    program over several devices one of them takes the item for all; see docs/feeds.md.

    Raises:
      EndOfFeed: there are no more items, and no default.
      GateError: the feed is closed, or was made in another process.
      BaseException: what the iterator raised in the place of this item. All of these fail the
        program (`jax.errors.JaxRuntimeError`), and are raised as themselves by `callgate.errors()`.
    """
    raise_deferred()
    self._producer.check()
    flat = next_p.bind(gate=self._gate, site=self._site, lead=(), engine=config.engine())
    return jax.tree.unflatten(self._tree, flat)

  def stats(self) -> dict[str, int]:
    """What has happened so far.

    Returns:
      "produced" (items that the iterator gave), "served" (items that programs took, defaults
      included), "waited" (times that a program found no item and had to wait) and "queued" (items
      that wait in the queue).
    """
    return self._producer.stats()

  def close(self, timeout: float = 5.0) -> bool:
    """Stops the iterator's thread; a program that asks for an item from here on fails.

    Args:
      timeout: seconds to wait for an iterator that is busy.

    Returns:
      Whether the thread has ended. If not, it ends when its iterator returns.
    """
    seconds = options.seconds(f"feed '{self.name}'", "timeout", timeout, zero=True)
    return self._producer.close(seconds)

  def __enter__(self) -> Feed:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def feed(
  iterable: Iterable[Any],
  *,
  prefetch: int = 2,
  shape: Any = None,
  default: Any = _MISSING,
  name: str | None = None,
) -> Feed:
  """Lets compiled programs read a host iterator, which runs ahead of them on a thread of its own.

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
    name: what messages and threads call the feed. Default: the iterable's qualified name, and a
      number from the second on.

  Once a program on a CUDA GPU has asked for an item, the feed's thread copies the next ones to that
  GPU ahead of the program, as far as `prefetch` goes, through pinned memory and on a stream of
  their own. The program's stream waits for such a copy where it must; nothing on the host waits for
  the GPU. Each waiting item then takes its size in the GPU's memory and in pinned memory. Of a feed
  that several GPUs read, an item is copied ahead to the one that asked last, and again where
  another gets it.

  Returns:
    A `Feed`.

  Raises:
    GateDefinitionError: an option is wrong, or there is no item to take the types from.
    ResultError: the first item holds something other than arrays and numbers.
    ValueError: the name is taken by another live feed or gate.
    BaseException: what the iterator raised in the place of its first item, if `shape` is None.
  """
  return Feed(iterable, prefetch, shape, default, name)


class _FeedGate(Gate):
  """A feed's gate: NumPy's arrays on the host, the GPU's own in a program for CUDA."""

  native = True


class _Take:
  """The function of a feed's gate: writes the next item, or one for each lane, into the results.

  On a GPU the results are Buffers, and items are on their way there already (`_feed/producer.py`).
  """

  def __init__(self, producer: _producer.Producer, rank: int) -> None:
    self._producer = producer
    self._rank = rank  # of an item's first leaf: what comes before are batch axes

  def __call__(self, outs: Sequence[Any]) -> None:
    batch = outs[0].ndim - self._rank
    lanes = math.prod(outs[0].shape[:batch])
    place = _callgate.device_call()
    if place is not None:
      for lane in range(lanes):
        self._producer.take_uploaded(place[1]).give(outs, lane, lanes)
      return
    rows = [out.reshape(lanes, *out.shape[batch:]) for out in outs]
    for lane in range(lanes):
      for row, array in zip(rows, self._producer.take(), strict=True):
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
    hint = "; call the function" if callable(iterable) else ""
    raise GateDefinitionError(
      f"feed '{name}': iterable: expected an iterable of items, got {type(iterable).__name__}{hint}"
    ) from error


# -- the primitive ---------------------------------------------------------------------------------
# Parameters: gate and site, as the gate's primitive has them; lead, the sizes of the axes that the
# call is mapped over, outermost first; engine, what runs it.
next_p = Primitive("feed_next")
next_p.multiple_results = True
tracing.define_impl(next_p)


@next_p.def_effectful_abstract_eval
def _abstract_eval(
  *, gate: Gate, site: CallSite, lead: tuple[int, ...], engine: str
) -> tuple[tuple[Any, ...], frozenset[Any]]:
  effect = tracing.ordered_io_effect if engine == "jax" else effects.ORDERED_GATE_EFFECT
  avals = (tracing.shaped_array((*lead, *shape), dtype, ()) for shape, dtype in site.results)
  # In a jax.shard_map each device takes items for itself.
  axes = tracing.manual_axes()
  return tuple(tracing.varying_aval(aval, axes) for aval in avals), frozenset({effect})


def _batch(
  axis_data: Any,
  operands: Sequence[Any],
  dims: Sequence[Any],
  *,
  lead: tuple[int, ...],
  **params: Any,
) -> tuple[Sequence[Any], Sequence[int]]:
  results = next_p.bind(lead=(axis_data.size, *lead), **params)
  return results, [0] * len(results)


batching.fancy_primitive_batchers[next_p] = _batch


def _lower(
  context: Any, *, gate: Gate, site: CallSite, lead: tuple[int, ...], engine: str
) -> Sequence[Any]:
  results = tuple(((*lead, *shape), dtype) for shape, dtype in site.results)
  whole = dataclasses.replace(site, results=results)
  if engine == "jax":
    call = mlir.lower_fun(lambda: jax_engine.bind(gate, whole, ()), multiple_results=True)
    return call(context)
  return primitive.lower(context, call=BoundCall(gate, whole))


# Not cached, as the gates' own rule: its source line is part of the program.
mlir.register_lowering(next_p, _lower, cacheable=False)
