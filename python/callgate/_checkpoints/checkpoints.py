# SPDX-License-Identifier: Apache-2.0
"""`callgate.Checkpoints`: a loop's carry saved while the loop runs, and taken up again."""

from __future__ import annotations

import functools
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._checkpoints import files, orbax, others
from callgate._checkpoints.writer import Writer, leaves_of
from callgate._core import dtypes, options, registry
from callgate._core.errors import GateDefinitionError
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._runtime import lifecycle
from callgate._sharding import tiles
from callgate._tap import channel, tap

_LEAST_CAPACITY = 64 << 20  # bytes of carries that wait for the disk
_alive: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


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
  the first that has it, and whoever writes the last part makes the checkpoint whole; any other
  number of devices and processes can go on with it.

  What can't be written is the error of `callgate.barrier()`; the loop goes on. Over processes the
  newest one is there after `callgate.barrier(all_processes=True)`. As a context manager
  it is closed at the end of the block.

  Args:
    folder: where they go; it is made if it isn't there.
    every: steps from one to the next.
    keep: how many of the newest stay.
    resume: start from the newest one, if there is one. Steps that are skipped don't run, and their
      ys are zeros; such a loop has no reverse derivative. Without it a folder with checkpoints of
      another `Checkpoints` is refused when the loop begins.
    format: "npz": files of NumPy's, one for each device with a part. "orbax": what Orbax restores;
      one process puts the parts together, in its memory. Either is gone on with.

  Raises:
    GateDefinitionError: an option is wrong, or Orbax is not installed.
    FileExistsError: from the program, without `resume`: the folder has checkpoints.
    GateError: from the program: the newest one is of another carry, or of a longer loop.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, every: int = 1000, keep: int = 3, resume: bool = False,
    format: Literal["npz", "orbax"] = "npz",
  ) -> None:  # fmt: skip
    label = "Checkpoints"
    self.folder = Path(options.path(label, "folder", folder)).absolute()
    self.every = options.count(label, "every", every, least=1, most=2**31 - 1)
    self.keep = options.count(label, "keep", keep, least=1)
    self.resume = options.boolean(label, "resume", resume)
    self.format = options.choice(label, "format", format, ("npz", "orbax"))
    if format == "orbax":
      orbax.library()
    self._writer = Writer(self.folder, self.keep, self.format)
    self._lock = threading.Lock()
    self._channel: channel.Channel | None = None
    self._gates: dict[Any, Gate] = {}
    _alive.add(self)

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
    arrays = [_read(found[-1], i, part) for i, part in enumerate(whole)]
    orbax.forget()
    given, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, map(_in_its_dtype, arrays, given))

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
  def begin(self, init: Any, length: int | None) -> tuple[jax.Array, jax.Array, Any]:
    """Where the loop starts: the number of steps that have run, that of the run, and the carry.

    `length` is that of a loop that is resumed.

    In a program over several processes one of them finds it out, for all.
    """
    self._refuse_region()
    if self.format == "orbax":
      orbax.check(leaves_of(init))
    number = jax.ShapeDtypeStruct((), np.int32)
    find = functools.partial(self._find, length)
    step, run = self._gate("begin", length, find, (number, number), "io")()
    if not self.resume:
      return step, run, init
    leaves, tree = jax.tree.flatten(init)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    carried = [dtypes.carried(x)[0] for x in arrays]
    known = leaves_of(init)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carried]
    take = functools.partial(self._take, known)
    loaded = self._gate("load", known, take, lambda _, __, *arrays: arrays, "pure", types)(
      step, run, *carried
    )
    taken = [tap.uncarried(x, y) for x, y in zip(arrays, loaded, strict=True)]
    return step, run, jax.tree.unflatten(tree, taken)

  def send(self, step: Any, run: Any, carry: Any, where: Any) -> None:
    """Saves the carry where a predicate is true."""
    self._refuse_region()
    sent = jax.tree.map(_refusing_lanes, jax.lax.stop_gradient(carry))
    tap.tap((step, run, sent), self._open(leaves_of(carry)), name="checkpoint", where=where)

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

  def _find(self, length: int | None) -> Any:
    """Prepares the folder; returns the step to go on from, or 0, and a number for the run."""
    if self.format == "orbax" and jax.process_index() != 0:
      raise GateDefinitionError(
        "Checkpoints: format='orbax': expected a program whose first device is process 0's, which "
        f"puts the parts together; got one that begins in process {jax.process_index()}"
      )
    run = secrets.randbelow(2**31 - 1) + 1
    files.begin(self.folder, run)
    found = files.whole(self.folder)
    if self.resume:
      for folder in files.damaged(self.folder, found):
        print(f"callgate: {folder} is damaged, and passed over", file=sys.stderr)
      for saved in reversed(found):
        if (orbax.intact if saved.orbax else files.intact)(saved):
          if length is not None and saved.step > length:
            raise ValueError(
              f"{saved.folder}: expected a loop of at least {saved.step} steps to go on with it, "
              f"got one of {length}"
            )
          return np.int32(saved.step), np.int32(run)
        print(f"callgate: {saved.folder} is damaged, and passed over", file=sys.stderr)
    elif found and not self._writer.wrote:
      raise FileExistsError(
        f"{self.folder}: expected no checkpoints without resume=True, got those of steps "
        f"{', '.join(str(saved.step) for saved in found)}"
      )
    return np.int32(0), np.int32(run)

  def _take(
    self, leaves: tuple[files.Leaf, ...], step: Any, run: Any, *given: Any
  ) -> tuple[Any, ...]:
    """The parts of a checkpoint that this device has of the given arrays; these, for step 0."""
    if int(step) == 0:
      return tuple(np.array(x) for x in given)
    try:
      saved = files.find(self.folder, int(step))
      _check_same(saved, leaves)
      place = _callgate.current_place()
      parts = [tuple(slice(0, n) for n in leaf.shape) for leaf in leaves]
      if place is not None and place[4] and place[3] >= 0:
        parts = tiles.parts(place[4], place[3])[2:]
      return tuple(_read(saved, i, part) for i, part in enumerate(parts))
    except BaseException:
      others.refuse(int(run))
      raise

  def _open(self, leaves: tuple[files.Leaf, ...]) -> channel.Channel:
    size = sum(int(np.prod(leaf.shape)) * 16 for leaf in leaves)
    with self._lock:
      if self._channel is None:
        name = registry.free_name(f"checkpoints: {self.folder}")
        most = max(2 * size, _LEAST_CAPACITY)
        self._channel = channel.channel(name, capacity=most, to=self._writer)
      return self._channel


def finish(seconds: float) -> None:
  """At the end of the process: waits for the disk, as long as it takes but after Ctrl-C."""
  for saves in list(_alive):
    one = saves._channel  # pyright: ignore[reportPrivateUsage]
    if one is None or lifecycle.is_interrupted():
      continue
    try:
      one.flush(seconds)
    except TimeoutError:
      what = "the end of the program waits until they are on the disk; Ctrl-C gives them up"
      print(f"callgate: checkpoints in {saves.folder}: {what}", file=sys.stderr)
      one.flush()


class _OfDisk(Gate):
  taped = False  # a replay's disk is its own


class _Load(_OfDisk):
  located = True


def _in_its_dtype(array: Any, given: Any) -> Any:
  """What was saved, perhaps in a wider dtype, in that of the carry; of random keys their bits."""
  dtype = getattr(given, "dtype", array.dtype)
  is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
  return array if is_key else array.astype(dtype, copy=False)


def _read(saved: files.Saved, number: int, part: files.Slices) -> Any:
  return (orbax.read if saved.orbax else files.read)(saved, number, part)


def _loaded_jvp(load: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
  """The carry depends on the given one where the loop begins, and not on one from the disk."""
  step, *_ = primals
  moved = [
    t if t.dtype == jax.dtypes.float0 else jnp.where(step == 0, t, jnp.zeros_like(t))
    for t in tangents[2:]
  ]
  return load()(*primals), tuple(moved)


def _check_same(saved: files.Saved, leaves: Sequence[files.Leaf]) -> None:
  where = f"{saved.folder}: expected a checkpoint of this carry"
  if len(saved.leaves) != len(leaves):
    have, want = len(saved.leaves), len(leaves)
    raise ValueError(f"{where}, with {want} arrays, got one with {have}")
  for have, want in zip(saved.leaves, leaves, strict=True):
    if have != want:
      raise ValueError(f"{where}, with {want.name}: {want}, got one with {have.name}: {have}")


def _elementwise(types: Sequence[Any]) -> str:
  """The rule of arrays whose dimensions may all be split, behind two numbers."""
  letters = iter(f"d{i}" for i in range(sum(len(x.shape) for x in types)))
  terms = [" ".join(next(letters) for _ in x.shape) for x in types]
  return f", , {', '.join(terms)} -> {', '.join(terms)}"


@jax.custom_batching.custom_vmap
def _refusing_lanes(x: Any) -> Any:
  return x


@_refusing_lanes.def_vmap
def _refuse_lanes(*_: Any, **__: Any) -> Any:
  raise GateDefinitionError(
    "Checkpoints: expected a scan outside of jax.vmap, got one in it; put the jax.vmap into the "
    "body of the loop"
  )
