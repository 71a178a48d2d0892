# SPDX-License-Identifier: Apache-2.0
"""`callgate.Checkpoints`: a loop's carry saved while the loop runs, and taken up again."""

from __future__ import annotations

import os
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
from callgate._checkpoints import files, loading, orbax
from callgate._checkpoints.claim import Claim
from callgate._checkpoints.parts import Leaf, Saved
from callgate._checkpoints.writer import Writer, leaves_of
from callgate._core import options, registry
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing
from callgate._objects.handle import Handle
from callgate._part import Part, Phase, Wait, join
from callgate._runtime import barrier, lifecycle
from callgate._tap import channel, tap

_LEAST_CAPACITY = 64 << 20  # bytes of carries that wait for the disk
# The channels, which may outlive their `Checkpoints`, and the folders. Under the GIL: single steps.
_open: weakref.WeakKeyDictionary[channel.Channel, Path] = weakref.WeakKeyDictionary()


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

  `callgate.barrier()` raises the error of a checkpoint that can't be written; the loop goes on.
  Over processes the newest one is there after `callgate.barrier(all_processes=True)`. As a context
  manager it waits for the disk at the end of the block. Its thread ends when neither this nor a
  program that saves with it is left.

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
    if "\n" in str(self.folder):  # programs and messages name it in one line
      options.refuse(label, "folder", "a path without a newline", str(self.folder))
    self.every = options.count(label, "every", every, least=1, most=2**31 - 1)
    self.keep = options.count(label, "keep", keep, least=1)
    self.resume = options.boolean(label, "resume", resume)
    self.format = options.choice(label, "format", format, ("npz", "orbax"))
    if format == "orbax":
      orbax.library()
    self._loader = loading.Loader(self.folder, resume=resume, of_orbax=format == "orbax")
    self._writer = Writer(self.folder, self.keep, self.format, self._loader.wrote)
    self._lock = threading.Lock()
    self._channel: channel.Channel | None = None
    self._claim = Claim()

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
    saved = self._chosen(step)
    given, tree = jax.tree.flatten(like)
    if (own := leaves_of(like, canonical=False)) != saved.leaves:
      loading.check_same(saved, own := leaves_of(like))
    whole = [tuple(slice(0, n) for n in leaf.shape) for leaf in own]
    try:
      arrays = [loading.read(saved, i, part) for i, part in enumerate(whole)]
    finally:
      orbax.forget()
    return jax.tree.unflatten(tree, map(_in_its_dtype, arrays, given))

  def _chosen(self, step: int | None) -> Saved:
    """The checkpoint of a step, or the newest one."""
    found = files.whole(self.folder)
    newest = found[-1].step if found else -1
    chosen = [saved for saved in found if step in (None, saved.step)]
    for folder, number in files.damaged(self.folder, found):
      if number == step or (step is None and number > newest):
        other = f"; step={newest} is whole" if found else ""
        raise ValueError(f"{folder}: expected a checkpoint that is whole, got a damaged one{other}")
    if not chosen:
      what = "a checkpoint" if step is None else f"one of step {step}"
      raise FileNotFoundError(f"{self.folder}: expected {what}, got those of {self.steps()}")
    return chosen[-1]

  def close(self) -> None:
    """Waits until what programs have sent is on the disk; the end of the process does so, too.

    A program that is called again later saves again.

    Raises:
      OSError: something could not be written.
    """
    if self._channel is not None and not _callgate.channels_abandoned():  # those are the parent's
      barrier.wait_for_programs()
      self._channel.flush()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # -- in programs ---------------------------------------------------------------------------------
  def begin(self, body: Any, init: Any, length: int | None) -> tuple[jax.Array, jax.Array, Any]:
    """Where the loop starts: the number of steps that have run, that of the run, and the carry.

    `length` is that of a loop that is resumed.

    In a program over several processes one of them finds it out, for all.
    """
    self._refuse_region()
    _refuse_handles(init)
    leaves = leaves_of(init)
    if self.format == "orbax":
      orbax.check(leaves)
    with self._lock:
      self._claim.take(self.folder, body, leaves)
    step, run = self._loader.begin(length)
    return step, run, self._loader.load(step, run, init, leaves) if self.resume else init

  def counts(self, step: Any, run: Any, feeds: Sequence[str]) -> Any:
    """How many items the feeds of the body had given by the step that the loop goes on from."""
    return self._loader.counts(step, run, feeds)

  def send(self, step: Any, run: Any, carry: Any, feeds: Any, where: Any) -> None:
    """Saves the carry, and by their names the counts of feeds, where a predicate is true."""
    self._refuse_region()
    _refuse_handles(carry)
    sent = jax.tree.map(loading.refusing_lanes, jax.lax.stop_gradient(carry))
    to = self._open(leaves_of(carry))
    tap.tap((step, run, sent, feeds), to, name="checkpoint", where=where)

  def _refuse_region(self) -> None:
    if axes := tuple(tracing.region_axes()):
      raise GateDefinitionError(
        f"Checkpoints: expected a scan outside of jax.shard_map, got one over its axes {axes}; "
        "use jax.shard_map in the body of the loop instead"
      )

  def _open(self, leaves: tuple[Leaf, ...]) -> channel.Channel:
    size = sum(int(np.prod(leaf.shape)) * 16 for leaf in leaves)
    with self._lock:
      if self._channel is None:
        name = registry.free_name(f"checkpoints: {self.folder}")
        most = max(2 * size, _LEAST_CAPACITY)
        self._channel = channel.channel(name, capacity=most, to=self._writer)
        _open[self._channel] = self.folder
        # The loader lives as long as this, and as programs that save: the gates that they call
        # have it. With it the channel and its thread end.
        weakref.finalize(self._loader, self._writer.end, self._channel).atexit = False
      return self._channel


def finish(wait: Wait) -> None:
  """At the end of the process: waits for the disk, as long as it takes but after Ctrl-C.

  The end of all channels follows, which raises what could not be written.
  """
  for each in _open.keyrefs():
    if (one := each()) is None or lifecycle.is_interrupted() or one.flushed(wait.seconds):
      continue
    what = "the end of the program waits until they are on the disk; Ctrl-C gives them up"
    print(f"callgate: checkpoints in {_open[one]}: {what}", file=sys.stderr)
    one.flushed(None)


def _in_its_dtype(array: Any, given: Any) -> Any:
  """The saved array, perhaps of a wider dtype, in that of the carry; of random keys their bits."""
  dtype = getattr(given, "dtype", array.dtype)
  is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
  return array if is_key else array.astype(dtype, copy=False)


def _refuse_handles(carry: Any) -> None:
  found = jax.tree_util.tree_leaves_with_path(carry, is_leaf=lambda x: isinstance(x, Handle))
  for path, leaf in found:
    if isinstance(leaf, Handle):
      raise GateDefinitionError(
        "Checkpoints: expected a carry of arrays, got a handle at "
        f"{jax.tree_util.keystr(path) or 'carry'}: its object ends with this process, and the run "
        "that goes on has none. Make the object before the loop, for its body to use, and carry "
        "what it holds as arrays"
      )


class Writers(Part):
  """Has the checkpoints on the disk before the process ends."""

  name = "checkpoints"

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase == "deliver":
      finish(wait)


join(Writers())
