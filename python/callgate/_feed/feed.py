# SPDX-License-Identifier: Apache-2.0
"""Feeds: host iterators that compiled JAX programs read.

`Feed.next()` is an ordered gate that takes the next item from a producer's queue. The gate's
function holds the producer; the producer's thread holds neither. When no Feed and no program is
left that could take an item, the function dies, and its finalizer ends the thread.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from callgate._call.function import ArrayFunction
from callgate._call.site import CallSite
from callgate._core import dtypes, effects, errors, factories, failures, registry, tape
from callgate._core import options as check
from callgate._core.options import option
from callgate._core.pickling import Identity, Portable
from callgate._core.public import Closing
from callgate._core.weak import members
from callgate._feed import items
from callgate._feed import producer as _producer
from callgate._feed import shares as _shares
from callgate._feed.gate import CLOSE_SECONDS, FeedGate, next_p, take, take_share
from callgate._gate.options import GateOptions
from callgate._jax import dispatch, tracing
from callgate._part import Part, Phase, Wait, joins
from callgate._runtime import config


class _Missing:
  """The default of options for which None is a valid value."""

  def __repr__(self) -> str:
    return "<none>"


_MISSING = _Missing()
_NUMBER: Any = {"least": 1, "most": 2**31 - 1, "what": "an integer of 1 or more"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FeedOptions:
  """The options of `callgate.feed`.

  Attributes:
    prefetch: how many items the iterator may be ahead of the programs.
    shape: the types of an item, a pytree of objects with `.shape` and `.dtype`. Default: those of
      the first item, for which `feed` waits.
    default: the item for reads after the last item, or a prefix that broadcasts to an item. Without
      it such a read raises `EndOfFeed`.
    epochs: the number of iterations over the iterable; None for no end. More than one needs an
      iterable that starts anew, such as a list or a data loader, and not a generator.
    cast: casts other dtypes of the same kind to the feed's dtypes, which have 32 bits without
      `jax_enable_x64`. Default: `config(cast=)`, which is False; then such an item raises an error.
    sharding: how items lie on the devices of programs: a `jax.sharding.NamedSharding`, or a pytree
      of them that is a prefix of an item, all of one mesh. Each device takes only its share. In a
      multi-host program the iterator of each process must give the same whole items. Default: one
      device takes the item and sends it to all.
    resumable: a `callgate.scan` with `save=` stores how many items its body has read, and a resumed
      loop skips that many. Use False if the iterator itself continues at the right item.
    name: the name in messages and of the thread. Default: the iterable's qualified name, numbered
      if it is taken.
  """

  prefetch: int = option(2, check.count, **_NUMBER)
  shape: Any = None
  default: Any = _MISSING
  epochs: int | None = option(1, functools.partial(check.or_none, check.count), **_NUMBER)
  cast: bool | None = option(None, check.boolean)
  sharding: Any = None
  resumable: bool = option(True, check.boolean)
  name: str | None = None


class _FeedIdentity(Identity):
  """A feed as pickles store it."""

  travels = False
  why_not = "its iterator runs in this process"

  def __init__(self, name: str) -> None:
    self.name, self.label = name, f"feed '{name}'"


class Feed(Portable[_FeedIdentity], Closing):
  """A host iterator that compiled programs read; made by `callgate.feed`.

  A feed is a context manager that closes it. Outside compiled code it is an iterator over the
  remaining items.

  Attributes:
    name: the name in messages and of the thread.
    shape: the types of an item, as a pytree of ShapeDtypeStructs.
    prefetch: how many items the iterator may be ahead of the programs.
  """

  def __init__(self, iterable: Iterable[Any], options: FeedOptions) -> None:
    # The name of an unnamed feed is that of the generator function or of the iterable's class.
    named: Any = iterable if hasattr(iterable, "__qualname__") else type(iterable)
    self.name = name = check.name("feed", options.name) or registry.unique_name(named)
    super().__init__(_FeedIdentity(name))
    registry.take(name)  # closes the old feed before the iterator begins
    options = check.checked(f"feed '{name}'", options)
    self.prefetch, shape, default = options.prefetch, options.shape, options.default
    cast = config.cast() if options.cast is None else options.cast
    types = items.from_structs(name, shape, cast=cast) if shape is not None else None
    self._producer = _producer.Producer(
      name, _iterator(name, iterable, options.epochs), self.prefetch
    )
    try:
      if types is None and self._producer.wait_for_first():
        types = items.from_item(name, self._producer.first, cast=cast)
      elif types is None and default is _MISSING:
        empty = f"feed '{name}': the iterable is empty, so the items' types are not known"
        raise errors.GateDefinitionError(f"{empty}; pass shape= or default=")
      types = types or items.from_item(name, default, "default", cast=cast)
      structs = tuple(jax.ShapeDtypeStruct(*one) for one in types.types)
      self._tree = types.tree
      sharding = options.sharding
      shares = None if sharding is None else _shares.of(name, sharding, types)
      if shares is not None:
        pairs = zip(structs, shares.shardings, strict=True)
        structs = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on) for s, on in pairs)
      self._shares, self.shape = shares, jax.tree.unflatten(types.tree, structs)
      after = None if default is _MISSING else types.broadcast(default)
      rank = len(structs[0].shape)
      if shares is None:
        taking = functools.partial(take, self._producer, rank)
        made = GateOptions(out=structs, name=name, effect="ordered", style="inplace")
      else:
        taking = functools.partial(take_share, self._producer, rank, shares.takers)
        made = GateOptions(out=shares.structs, name=name, effect="ordered", style="context")
      weakref.finalize(taking, self._producer.release).atexit = False
      self._gate = FeedGate(taking, made)
      self._function = ArrayFunction(self._gate)  # keeps the gate's programs
      self._gate.shares, self._gate.resumable = shares, options.resumable
      if shares is not None:
        self._producer.serve(types.convert, after, len(shares.takers) or 1, shares.of_item)
        self._take_shares = jax.jit(shares.mapped(self._gate))
      else:
        if staged := self._producer.stage(types):
          self._gate.callee.serve_items(staged)
        self._producer.serve(types.convert, after)
      nothing, flat = jax.tree.structure(((), {})), jax.tree.structure(structs)
      self._site = CallSite(nothing, flat, static=(), results=types.types)
    except BaseException:  # also Ctrl-C while the first item is made
      self._producer.release()
      raise

  def __repr__(self) -> str:
    return f"<feed '{self.name}'>"

  def next(self) -> Any:
    """Takes the next item, inside or outside compiled code.

    Each execution takes one item, in program order, also across calls of the program. Under
    `jax.vmap` each lane takes an item of its own, in lane order, even if nothing else is mapped.
    Items are constants to derivatives. In a program over several devices, one device takes the item
    for all (docs/feeds.md). With `sharding` each device takes its share, and `jax.vmap` isn't
    supported. Outside compiled code `next(feed)` and `for item in feed` take items, too, and end
    with the data.

    Returns:
      A pytree of jax.Arrays of the types in `shape`.

    Raises:
      EndOfFeed: (fails the program) there is no further item and no default.
      GateError: (fails the program) the feed is closed, or belongs to another process.
      BaseException: (fails the program) the iterator raised it instead of giving this item. A
        failed program raises `jax.errors.JaxRuntimeError`; `callgate.errors()` raises these
        exceptions themselves.
    """
    failures.raise_deferred()
    self._producer.check()
    if self._shares is None:
      flat = next_p.bind(gate=self._gate, site=self._site, lead=(), engine=config.engine())
    else:
      self._check_whole_program()
      flat = self._take_shares()
    return jax.tree.unflatten(self._tree, flat)

  def _check_whole_program(self) -> None:
    """Raises if no program over the mesh can take an item here."""
    if (manual := tracing.in_manual_region()) or tracing.in_vmap():
      where = "jax.shard_map" if manual else "jax.vmap"
      expected = f"call next() outside {where} and pass its result in"
      raise errors.GateError(f"feed '{self.name}': its items are split over a mesh; {expected}")
    if config.engine() == "jax":
      expected = "use config(engine='callgate'), or a feed without sharding="
      raise errors.GateError(
        f"feed '{self.name}': JAX's callbacks don't know the device; {expected}"
      )

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    """Takes the next item outside compiled code, after the programs that this thread has called.

    It returns a pytree of jax.Arrays like `next()`. The call is thread-safe: each thread gets items
    of its own.

    Raises:
      StopIteration: there is no further item and no default.
      GateError: as for `next()`; or JAX is tracing, so that all executions would get the same item.
      BaseException: the iterator raised it instead of giving this item.
    """
    if not tracing.in_no_trace():
      why = (
        "a program that is being traced can't iterate over it, since it would keep one item forever"
      )
      raise errors.GateError(f"feed '{self.name}': {why}; use feed.next()")
    failures.raise_deferred()
    for effect in (effects.ORDERED_GATE_EFFECT, tracing.ordered_io_effect):
      dispatch.wait_for_own(effect)
    try:
      arrays = tape.call(
        self.name, (), [(dtypes.dtype_code(x.dtype), x.shape) for x in jax.tree.leaves(self.shape)],
        self._producer.take_whole,
      )  # fmt: skip
    except errors.EndOfFeed as error:
      # The exception may come from another feed, which the iterator reads.
      if self._producer.raised(error):
        raise
      raise StopIteration from None
    put = jax.device_put if self._shares is None else self._shares.put
    return jax.tree.unflatten(self._tree, put(list(arrays)))

  def stats(self) -> dict[str, int]:
    """Returns counters.

    - `produced`: items that the iterator has given.
    - `served`: items that programs have taken, with defaults.
    - `waited`: how often a program had to wait for an item.
    - `queued`: items that wait in the queue.
    """
    return self._producer.stats()

  def close(self, timeout: float = CLOSE_SECONDS) -> bool:
    """Stops the iterator's thread; programs that ask for an item from now on fail.

    Args:
      timeout: the most seconds to wait for a busy iterator.

    Returns:
      True if the thread has ended. If not, it ends when the iterator returns.
    """
    seconds = check.seconds(f"feed '{self.name}'", "timeout", timeout, zero=True)
    return self._producer.close(seconds)


@factories.of_one(FeedOptions)
def feed(iterable: Iterable[Any], *, options: FeedOptions) -> Feed:
  """Lets compiled programs read a host iterator, which prefetches on a thread of its own.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  with cg.feed(np.float32(i) for i in range(10)) as numbers:
    total = jax.jit(lambda: jax.lax.fori_loop(0, 10, lambda i, s: s + numbers.next(), 0.0))()
    assert total == 45
  ```

  After a program on a CUDA GPU has read an item, the feed's thread copies the next items to that
  GPU ahead of time, up to `prefetch`. Each of these copies needs its size in GPU memory and in
  pinned memory. With several GPUs, the items go to the GPU that read last (docs/gpu_taps_feeds.md).

  Args:
    iterable: gives the items: pytrees of NumPy or JAX arrays, torch tensors or Python scalars. All
      must have the same structure, shapes and dtypes, which callgate checks. Python scalars get
      JAX's default dtypes; integers of another width are converted if they fit.

  Returns:
    A `Feed`, also a context manager.

  Raises:
    GateDefinitionError: an option is wrong, or there is no first item to take the types from.
    ResultError: the first item has a leaf that is neither an array nor a number.
    ValueError: another live feed or gate has the name.
    BaseException: the iterator raised it instead of giving the first item, if `shape` is None.
  """
  return Feed(iterable, options)


@joins("feeds")
class Feeds(Part):
  """Ends the feeds' threads."""

  def end(self, phase: Phase, wait: Wait) -> None:
    producers = members(_producer.alive)
    if phase == "hurry":  # programs may still take items, but not wait for an iterator that hangs
      for producer in producers:
        producer.limit_patience(wait.left)
    elif phase == "join":  # programs have ended: end the threads
      for producer in producers:
        producer.release()
      for producer in producers:
        producer.close(wait.left)


# -- checks ----------------------------------------------------------------------------------------
def _iterator(name: str, iterable: Any, epochs: int | None) -> Iterator[Any]:
  if isinstance(iterable, str):
    check.refuse(f"feed '{name}'", "iterable", "an iterable of items", iterable)
  try:
    iterator = iter(iterable)
  except TypeError as error:
    if hasattr(iterable, "__iter__") and getattr(iterable, "ndim", None) != 0:
      raise  # the feed's own exception
    got = type(iterable).__name__ + ("; call the function" if callable(iterable) else "")
    expected = f"expected an iterable of items, got {got}"
    raise errors.GateDefinitionError(f"feed '{name}': iterable: {expected}") from error
  if epochs == 1:
    return iterator
  if iterator is iterable:
    what = (
      f"epochs={epochs}: expected an iterable that can be iterated again, such as a list or a "
      "data loader"
    )
    got = f"got {type(iterable).__name__}, an iterator"
    raise errors.GateDefinitionError(f"feed '{name}': {what}; {got}")
  return _repeated(iterable, iterator, epochs)


def _repeated(
  iterable: Iterable[Any], iterator: Iterator[Any], epochs: int | None
) -> Iterator[Any]:
  for number in itertools.count(1):
    empty = True
    for item in iterator:
      yield item
      del item  # freed while the next one is made
      empty = False
    if empty or number == epochs:
      return
    iterator = iter(iterable)
