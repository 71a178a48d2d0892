# SPDX-License-Identifier: Apache-2.0
"""`callgate.Checkpoints`: a loop's carry saved while the loop runs, and taken up again."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._checkpoints import files
from callgate._core import dtypes, options, registry
from callgate._core.errors import GateDefinitionError
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._sharding import tiles
from callgate._tap import channel, tap
from callgate._tap.records import TapInfo, is_part

_LEAST_CAPACITY = 64 << 20  # bytes of carries that wait for the disk


class Checkpoints:
  """Saves the carry of a `scan` while the loop runs: `cg.scan(..., save=cg.Checkpoints(...))`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, tempfile

  folder = tempfile.mkdtemp()

  def step(x, _):
    return x + 1, x

  def run(saves):
    return jax.jit(lambda x: cg.scan(step, x, length=100, save=saves))(0)

  run(cg.Checkpoints(folder, every=30))
  cg.barrier()                                  # what is on its way is on the disk then
  assert cg.Checkpoints(folder).steps() == (60, 90, 100)
  x, xs = run(cg.Checkpoints(folder, resume=True))  # nothing is left to do
  assert x == 100 and not xs.any()
  ```

  A tap sends the carry after each so many steps, and after the last one that runs. The channel's
  thread writes it: the program waits for the copy alone, or for the disk where that is slower than
  the loop for long. A checkpoint is there whole, by its name, or not at all, also after kill -9.
  Over several devices and processes, which share the folder, each part of an array is written by
  one that has it; any other number of devices can go on with it.

  What can't be written is the error of `callgate.barrier()`; the loop goes on. As a context manager
  it is closed at the end of the block.

  Args:
    folder: where they go; it is made if it isn't there.
    every: steps from one to the next.
    keep: how many of the newest stay.
    resume: start from the newest one, if there is one. Steps that are skipped don't run, and their
      ys are zeros; such a loop has no reverse derivative. Without it a folder with checkpoints of
      another `Checkpoints` is refused when the loop begins.

  Raises:
    GateDefinitionError: an option is wrong.
    FileExistsError: from the program, without `resume`: the folder has checkpoints.
    GateError: from the program: the newest one is of another carry.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, every: int = 1000, keep: int = 3, resume: bool = False
  ) -> None:
    label = "Checkpoints"
    self.folder = Path(options.path(label, "folder", folder)).absolute()
    self.every = options.count(label, "every", every, least=1, most=2**31 - 1)
    self.keep = options.count(label, "keep", keep, least=1)
    self.resume = options.boolean(label, "resume", resume)
    self._wrote = False
    self._lock = threading.Lock()
    self._channel: channel.Channel | None = None
    self._gates: dict[Any, Gate] = {}
    self._sent: tuple[Any, set[Any]] = (None, set())  # which run and step, and its parts

  def __repr__(self) -> str:
    return f"<Checkpoints in {self.folder}>"

  def steps(self) -> tuple[int, ...]:
    """The numbers of steps after which the checkpoints are that are there, the newest last."""
    return tuple(saved.step for saved in files.whole(self.folder))

  def load(self, like: Any, step: int | None = None) -> Any:
    """A saved carry, outside of programs.

    Args:
      like: a pytree with the carry's arrays, or their types.
      step: which one; default: the newest.

    Returns:
      The pytree, of NumPy arrays (of random keys, their bits).

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is of another carry, or damaged.
    """
    found = [s for s in files.whole(self.folder) if step is None or s.step == step]
    if not found:
      what = "a checkpoint" if step is None else f"one of step {step}"
      raise FileNotFoundError(f"{self.folder}: expected {what}, got those of {self.steps()}")
    leaves = leaves_of(like)
    _check_same(found[-1], leaves)
    whole = [tuple(slice(0, n) for n in leaf.shape) for leaf in leaves]
    arrays = [files.read(found[-1], i, part) for i, part in enumerate(whole)]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)

  def close(self) -> None:
    """Waits until what programs have sent is on the disk; the end of the process does so, too.

    Raises:
      OSError: something could not be written.
    """
    with self._lock:
      open_one, self._channel = self._channel, None
    if open_one is not None:
      with open_one:
        pass

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # -- in programs ---------------------------------------------------------------------------------
  def begin(self, init: Any) -> tuple[jax.Array, Any]:
    """Where the loop starts: the number of steps that have run, and the carry."""
    self._refuse_region()
    step = self._gate("begin", (), self._find, jax.ShapeDtypeStruct((), np.int32), "io")()
    if not self.resume:
      return step, init
    leaves, tree = jax.tree.flatten(init)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    carried = [dtypes.carried(x)[0] for x in arrays]
    known = leaves_of(init)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carried]
    take = functools.partial(self._take, known)
    loaded = self._gate("load", known, take, lambda _, *arrays: arrays, "pure", types)(
      step, *carried
    )
    taken = [tap.uncarried(x, y) for x, y in zip(arrays, loaded, strict=True)]
    return step, jax.tree.unflatten(tree, taken)

  def send(self, step: Any, carry: Any, where: Any) -> None:
    """Saves the carry where a predicate is true."""
    self._refuse_region()
    tap.tap((step, carry), self._open(leaves_of(carry)), name="checkpoint", where=where)

  def _refuse_region(self) -> None:
    if axes := tuple(tracing.region_axes()):
      raise GateDefinitionError(
        f"Checkpoints: expected a scan outside of jax.shard_map, got one over its axes {axes}; "
        "use jax.shard_map in the body of the loop instead"
      )

  def _gate(
    self, what: str, key: Any, function: Any, out: Any, effect: Any, types: Sequence[Any] = ()
  ) -> Gate:
    with self._lock:
      if (what, key) not in self._gates:
        name = registry.free_name(f"checkpoints {what}: {self.folder}")
        kind = _Load if what == "load" else _OfDisk
        sharding = _elementwise(types) if types else "shard"
        made = GateOptions(out=out, name=name, effect=effect, vmap=_refuse_lanes, sharding=sharding)
        gate = self._gates[what, key] = kind(function, made)
        if what == "load":
          gate.defjvp(functools.partial(_loaded_jvp, weakref.ref(gate)))
      return self._gates[what, key]

  def _find(self) -> Any:
    """Prepares the folder; returns the step of the checkpoint to go on from, or 0."""
    self.folder.mkdir(parents=True, exist_ok=True)
    files.clean(self.folder)
    found = files.whole(self.folder)
    if self.resume:
      for saved in reversed(found):
        if files.intact(saved):
          return np.int32(saved.step)
        print(f"callgate: {saved.folder} is damaged; trying the one before", file=sys.stderr)
      return np.int32(0)
    if found and not self._wrote:
      raise FileExistsError(
        f"{self.folder}: expected no checkpoints without resume=True, got those of steps "
        f"{', '.join(str(saved.step) for saved in found)}"
      )
    return np.int32(0)

  def _take(self, leaves: tuple[files.Leaf, ...], step: Any, *given: Any) -> tuple[Any, ...]:
    """The parts of a checkpoint that this device has of the given arrays; these, for step 0."""
    if int(step) == 0:
      return tuple(np.array(x) for x in given)
    saved = next(s for s in reversed(files.whole(self.folder)) if s.step == int(step))
    _check_same(saved, leaves)
    place = _callgate.current_place()
    parts = [tuple(slice(0, n) for n in leaf.shape) for leaf in leaves]
    if place is not None and place[4] and place[3] >= 0:
      parts = tiles.parts(place[4], place[3])[1:]
    return tuple(files.read(saved, i, part) for i, part in enumerate(parts))

  # -- on the channel's thread ---------------------------------------------------------------------
  def _open(self, leaves: tuple[files.Leaf, ...]) -> channel.Channel:
    size = sum(int(np.prod(leaf.shape)) * 16 for leaf in leaves)
    with self._lock:
      if self._channel is None:
        name = registry.free_name(f"checkpoints: {self.folder}")
        most = max(2 * size, _LEAST_CAPACITY)
        self._channel = channel.channel(name, capacity=most, to=_Writer(self))
      return self._channel

  def save(self, value: Any, info: TapInfo) -> None:
    """Writes what a device has of a carry."""
    if info.lane:
      raise ValueError("Checkpoints: expected a scan outside of jax.vmap: put it into the body")
    if info.repeated:
      return
    step, carry = value
    arrays = jax.tree.leaves(carry)
    names = [leaf.name for leaf in leaves_of(carry)]
    shards = jax.tree.leaves(info.shard, is_leaf=is_part) if info.shard is not None else None
    extents = jax.tree.leaves(info.global_shape, is_leaf=_is_shape) if shards is not None else None
    leaves: list[files.Leaf] = []
    parts: dict[int, tuple[files.Slices, Any]] = {}
    key, number = (info.run, int(step)), int(step)
    if self._sent[0] != key:
      self._sent = key, set()
    for i, array in enumerate(arrays):
      # The step's own count is the first leaf of the record.
      shape = tuple(extents[i + 1]) if extents is not None else array.shape
      part = shards[i + 1] if shards is not None else (slice(None),) * array.ndim
      part = tuple(slice(*s.indices(n)[:2]) for s, n in zip(part, shape, strict=True))
      array = array.astype(dtypes.carrier(array.dtype), copy=False)
      leaves.append(files.Leaf(names[i], shape, array.dtype.name))
      seen = i, tuple((s.start, s.stop) for s in part)
      if seen not in self._sent[1]:
        parts[i] = part, array
        self._sent[1].add(seen)
    if not parts:
      return
    self._wrote = True
    name = f"part_{info.process:05d}_{info.device:05d}"
    if files.write(self.folder, number, info.run, name, leaves, parts) is not None:
      files.keep_newest(self.folder, self.keep)


class _Writer:
  """The channel's consumer: the channel doesn't keep its `Checkpoints`, whose programs do."""

  def __init__(self, of: Checkpoints) -> None:
    self._of = weakref.ref(of)

  def __call__(self, value: Any, info: TapInfo) -> None:
    if (of := self._of()) is not None:
      of.save(value, info)


class _OfDisk(Gate):
  taped = False  # a replay's disk is its own


class _Load(_OfDisk):
  located = True


def _loaded_jvp(load: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
  """The carry depends on the given one where the loop begins, and not on one from the disk."""
  step, *_ = primals
  moved = [
    t if t.dtype == jax.dtypes.float0 else jnp.where(step == 0, t, jnp.zeros_like(t))
    for t in tangents[1:]
  ]
  return load()(*primals), tuple(moved)


def leaves_of(carry: Any) -> tuple[files.Leaf, ...]:
  """What is known of a carry's arrays, as taps carry them."""
  found: list[files.Leaf] = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
    array = leaf if hasattr(leaf, "dtype") else np.asarray(jnp.asarray(leaf))
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      array = jax.eval_shape(jax.random.key_data, array)
    name, dtype = jax.tree_util.keystr(path) or "carry", dtypes.carrier(array.dtype)
    found.append(files.Leaf(name, tuple(array.shape), dtype.name))
  return tuple(found)


def _check_same(saved: files.Saved, leaves: Sequence[files.Leaf]) -> None:
  where = f"{saved.folder}: expected a checkpoint of this carry"
  if len(saved.leaves) != len(leaves):
    have, want = len(saved.leaves), len(leaves)
    raise ValueError(f"{where}, with {want} arrays, got one with {have}")
  for have, want in zip(saved.leaves, leaves, strict=True):
    if have != want:
      raise ValueError(f"{where}, with {want.name}: {want}, got one with {have.name}: {have}")


def _elementwise(types: Sequence[Any]) -> str:
  """The rule of arrays whose dimensions may all be split, behind a number."""
  letters = iter(f"d{i}" for i in range(sum(len(x.shape) for x in types)))
  terms = [" ".join(next(letters) for _ in x.shape) for x in types]
  return f", {', '.join(terms)} -> {', '.join(terms)}"


def _refuse_lanes(*_: Any, **__: Any) -> Any:
  raise GateDefinitionError(
    "Checkpoints: expected a scan outside of jax.vmap, got one in it; put the jax.vmap into the "
    "body of the loop"
  )


def _is_shape(x: Any) -> bool:
  return isinstance(x, tuple) and all(isinstance(n, int) for n in x)
