# SPDX-License-Identifier: Apache-2.0
"""The gates by which a program finds the newest checkpoint, and reads its parts of the carry."""

from __future__ import annotations

import functools
import secrets
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._checkpoints import files, orbax, others, parts
from callgate._checkpoints.parts import Leaf, Saved
from callgate._core import dtypes, registry
from callgate._core.errors import GateDefinitionError, GateError
from callgate._feed import resuming
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import loops
from callgate._sharding import tiles
from callgate._tap import channel, tap

_NUMBER = jax.ShapeDtypeStruct((), np.int32)
_REMEDY = "; use another folder, or the program that wrote this checkpoint"
# The channels, which may outlive their `Checkpoints`, and the folders. Atomic: single steps.
channels: weakref.WeakKeyDictionary[channel.Channel, Path] = weakref.WeakKeyDictionary()


class Loader:
  """Reads checkpoints in programs, for one `Checkpoints`; thread-safe for all devices' threads."""

  def __init__(self, folder: Path, *, resume: bool, of_orbax: bool) -> None:
    self._folder, self._resume, self._of_orbax = folder, resume, of_orbax
    self._lock = threading.RLock()
    self._gates: dict[Any, GateCallee] = {}
    self._execution = -1  # XLA's number of the execution in which a loop began last
    self._read: tuple[int, Saved] | None = None  # (the run's number, its checkpoint)
    self.wrote = threading.Event()  # set when the loop has saved a step

  # -- while a program is traced -------------------------------------------------------------------
  def begin(self, length: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns the number of steps that have run, and the number of the run."""
    find = functools.partial(self._find, length)
    return self._gate("begin", length, find, (_NUMBER, _NUMBER), "io")()

  def load(self, step: Any, run: Any, init: Any, leaves: tuple[Leaf, ...]) -> Any:
    """Returns the carry of a step, with the sharding of `init`; `init` itself for step 0."""
    given, tree = jax.tree.flatten(init)
    taken: list[Any] = []
    for number, array in enumerate(map(jnp.asarray, given)):
      operand = dtypes.carried(array)[0]
      # One call for each array: a single call would need the same partitioning for all arrays that
      # are split over the same mesh axis.
      gate = self._of_array(leaves, operand.ndim)
      loaded = tap.uncarried(array, gate(step, run, np.int32(number), operand))
      taken.append(loops.weakly_typed(loaded, jax.typeof(array).weak_type))
    return jax.tree.unflatten(tree, taken)

  def counts(self, step: Any, run: Any, feeds: Sequence[str]) -> Any:
    """Returns how many items each feed had given before a step: uint32[feeds, 2], as `words`."""
    count = functools.partial(self._counts, tuple(feeds))
    out = jax.ShapeDtypeStruct((len(feeds), *resuming.COUNT.shape), resuming.COUNT.dtype)
    return self._gate("counts", tuple(feeds), count, out, "pure")(step, run)

  def _of_array(self, leaves: tuple[Leaf, ...], rank: int) -> GateCallee:
    take, axes = functools.partial(self._take, leaves), " ".join(f"d{i}" for i in range(rank))
    rule = f", , , {axes} -> {axes}"
    return self._gate("load", (leaves, rank), take, lambda *of: of[-1], "pure", rule)

  def _gate(
    self, what: str, key: Any, function: Any, out: Any, effect: Any, sharding: str = "shard"
  ) -> GateCallee:
    with self._lock:
      if (what, key) not in self._gates:
        name = registry.free_name(f"checkpoints {what}: {self._folder}")
        made = GateOptions(out=out, name=name, effect=effect, vmap=refuse_lanes, sharding=sharding)
        gate = self._gates[what, key] = resuming.LoopGate(function, made)
        if what == "load":
          gate.set_jvp(functools.partial(_loaded_jvp, weakref.ref(gate)))
      return self._gates[what, key]

  # -- while a program runs ------------------------------------------------------------------------
  def _find(self, length: int | None) -> Any:
    """Prepares the folder; returns the step to resume from, or 0, and a number for the run."""
    self._refuse_second_loop()
    if self._of_orbax and jax.process_index() != 0:
      raise GateDefinitionError(
        "Checkpoints: format='orbax': expected a program whose first device belongs to process "
        f"0, which assembles the checkpoint; got one that begins in process {jax.process_index()}"
      )
    run = secrets.randbelow(2**31 - 1) + 1
    if self._resume:
      _flush(self._folder)  # waits for carries of the last execution
    files.begin(self._folder, run)
    found = files.whole(self._folder)
    if self._resume:
      return np.int32(self._newest_intact(found, length)), np.int32(run)
    if found and not self.wrote.is_set():
      raise FileExistsError(
        f"{self._folder}: expected an empty folder without resume=True, got checkpoints of steps "
        f"{', '.join(str(saved.step) for saved in found)}; pass resume=True, or use another "
        "folder"
      )
    return np.int32(0), np.int32(run)

  def _refuse_second_loop(self) -> None:
    if (execution := _callgate.current_run()) is None:  # with JAX's own callbacks
      return
    with self._lock:
      again, self._execution = execution == self._execution, execution
    if again:
      raise GateError(
        f"Checkpoints: {self._folder}: expected one loop in each execution of a program, got a "
        "second one, which would overwrite the first one's checkpoints. Give each loop its own "
        "cg.Checkpoints and folder; for nested loops save the outer one"
      )

  def _newest_intact(self, found: Sequence[Saved], length: int | None) -> int:
    for folder, _ in files.damaged(self._folder, found):
      _say_damaged(folder)
    for saved in reversed(found):
      if not (orbax.intact if saved.orbax else parts.intact)(saved):
        _say_damaged(saved.folder)
      elif length is not None and saved.step > length:
        raise ValueError(
          f"{saved.folder}: expected a loop of at least {saved.step} steps to resume, got one of "
          f"{length}; pass the number of steps from the loop's beginning, or use another folder"
        )
      else:
        return saved.step
    return 0

  def _take(
    self, leaves: tuple[Leaf, ...], step: Any, run: Any, number: Any, given: Any
  ) -> np.ndarray:
    """Returns this device's part of a saved array; for step 0 the given array."""
    if int(step) == 0:
      return np.array(given)
    try:
      saved = self._saved(int(step), int(run))
      check_same(saved, leaves)
      place = _callgate.current_place()
      part = tuple(slice(0, n) for n in leaves[number].shape)
      if place is not None and place[4] and place[3] >= 0:
        (part,) = tiles.parts(place[4], place[3])[3:]
      return read(saved, int(number), part)
    except BaseException:
      others.refuse(int(run))
      raise

  def _counts(self, feeds: tuple[str, ...], step: Any, run: Any) -> np.ndarray:
    numbers = [0] * len(feeds)
    if int(step):
      try:
        numbers = counts_of(self._saved(int(step), int(run)), feeds)
      except BaseException:
        others.refuse(int(run))
        raise
    return np.stack(list(map(resuming.words, numbers)))

  def _saved(self, step: int, run: int) -> Saved:
    """Returns the checkpoint of a step, which it looks up once in a run."""
    with self._lock:
      if self._read is None or self._read[0] != run:
        self._read = run, files.find(self._folder, step)
      return self._read[1]


def _flush(folder: Path) -> None:
  """Waits until the carries that this process's programs have sent to a folder are on the disk."""
  if _callgate.channels_abandoned():  # in a fork's child: they belong to the parent
    return
  for each in channels.keyrefs():
    if (one := each()) is not None and channels.get(one) == folder:
      channel.flushed(one, None)


def _say_damaged(folder: Path) -> None:
  print(f"callgate: {folder} is damaged and was skipped", file=sys.stderr)


def read(saved: Saved, number: int, part: parts.Slices) -> Any:
  return (orbax.read if saved.orbax else parts.read)(saved, number, part)


def check_same(saved: Saved, leaves: Sequence[Leaf]) -> None:
  """Raises a ValueError unless the checkpoint has arrays of these types."""
  if saved.leaves == tuple(leaves):
    return
  where = f"{saved.folder}: expected a checkpoint of this carry"
  if len(saved.leaves) != len(leaves):
    have, want = len(saved.leaves), len(leaves)
    raise ValueError(f"{where}, with {want} arrays, got one with {have}{_REMEDY}")
  for have, want in zip(saved.leaves, leaves, strict=True):
    if have != want:
      expected, got = f"{want.name}: {want}", f"{have.name}: {have}"
      raise ValueError(f"{where}, with {expected}, got one with {got}{_REMEDY}")


def counts_of(saved: Saved, feeds: Sequence[str]) -> list[int]:
  """Returns how many items the feeds of a loop's body had given.

  It finds feeds by name. If the names differ and the number is the same, it finds them by order.
  """
  known: Mapping[str, int] | None = saved.feeds
  if known is None or not known:
    print(
      f"callgate: {saved.folder} doesn't record feed(s) {', '.join(feeds)}; the loop reads them "
      "from their current positions",
      file=sys.stderr,
    )
    return [0] * len(feeds)
  if set(feeds) <= set(known):
    return [known[feed] for feed in feeds]
  if len(feeds) == len(known):
    return list(known.values())
  raise ValueError(
    f"{saved.folder}: expected the saved loop's feeds, {', '.join(known)}, got "
    f"{', '.join(feeds)}; pass name= to each feed"
  )


def _loaded_jvp(load: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
  """The carry depends on the given one if the loop begins there, not if it is from the disk."""
  step, tangent = primals[0], tangents[-1]
  if tangent.dtype != jax.dtypes.float0:
    tangent = jnp.where(step == 0, tangent, jnp.zeros_like(tangent))
  return load()(*primals), tangent


def refuse_lanes(*_: Any, **__: Any) -> Any:
  """Raises: the rule of `jax.vmap` for all parts of a saved loop."""
  raise GateDefinitionError(
    "Checkpoints: expected a scan outside jax.vmap, got one inside; put the jax.vmap into the "
    "loop's body"
  )


@jax.custom_batching.custom_vmap
def refusing_lanes(x: Any) -> Any:
  """Returns the array; raises under `jax.vmap`."""
  return x


@refusing_lanes.def_vmap
def _refuse_lanes(*_: Any, **__: Any) -> Any:
  refuse_lanes()
