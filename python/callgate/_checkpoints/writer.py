# SPDX-License-Identifier: Apache-2.0
"""The consumer of a loop's carries: writes the parts of this process's devices."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._checkpoints import files, orbax, others
from callgate._checkpoints.parts import InOrbax, Leaf, Saved, Slices
from callgate._core import dtypes
from callgate._feed import resuming
from callgate._jax import tracing
from callgate._part import Wait
from callgate._tap.channel import Channel
from callgate._tap.records import Record, TapInfo, is_part

NAME = "checkpoint"  # the name of the taps that send carries
_PATIENCE = 10.0  # seconds to wait for the parts of a process that has ended


class _Carry(NamedTuple):
  """Describes a carry, besides its arrays."""

  leaves: tuple[Leaf, ...]
  structure: Any
  feeds: Mapping[str, int]  # the items that the feeds of the loop's body have given


class Writer:
  """Writes the records of one `Checkpoints`, and sets `wrote`.

  The channel holds it. So it must not hold the loader, since the channel ends with that.
  """

  def __init__(self, folder: Path, keep: int, format: str, wrote: threading.Event) -> None:
    self._folder, self._keep, self._format, self._wrote = folder, keep, format, wrote
    self._ending: Channel | None = None
    # By run and step: carries of which parts may still be missing.
    self._unfinished: dict[tuple[int, int], _Carry] = {}

  def __repr__(self) -> str:
    return f"<Checkpoints in {self._folder}>"

  def open(self, channel: str) -> None:
    """There is nothing to open."""

  def write(self, records: Sequence[Record]) -> None:
    failed: list[BaseException] = []
    for record in records:
      try:
        self._save(record.value, record.info)
      except BaseException as error:  # noqa: BLE001 - the other records are still written
        failed.append(error)
    for error in failed:
      raise error

  def _save(self, value: Any, info: TapInfo) -> None:
    """Writes a device's parts of a carry."""
    if info.lane:
      raise ValueError(
        "Checkpoints: expected a scan outside jax.vmap; put the jax.vmap into the loop's body"
      )
    if info.repeated or info.name != NAME:  # a knob's change, for a stream beside this
      return
    step, run, carry, feeds = value
    number, run = int(step), int(run)
    # 0: finding the loop's first step has failed.
    if run == 0 or others.is_known(run) or others.is_known(run, number):
      return
    leaves, parts = _parts_of(carry, info)
    # A carry without arrays has no parts: one device records that the step was reached.
    if not parts and (leaves or not _is_first(info)):
      return
    self._wrote.set()
    files.take_part(run)
    name = f"part_{info.process:05d}_{info.device:05d}"
    try:
      files.write(self._folder, number, run, name, parts)
    except OSError:
      # A refusal has removed the files that this process was writing.
      if others.is_told(run, number):
        return
      others.refuse(run, number)
      raise
    if self._format == "npz" or info.process == 0:  # process 0 does the rest with Orbax
      carried = _Carry(tuple(leaves), jax.tree.structure(carry), resuming.numbers(feeds))
      self._unfinished[run, number] = carried
      try:
        self._finish()
      finally:
        if self._format == "npz" or jax.process_count() == 1:
          self._unfinished.clear()  # the writer of the last part does it

  def end(self, channel: Channel) -> None:
    """Ends the channel when all is written, since no more records come. Doesn't wait.

    The garbage collector calls it, on any thread. If that is the channel's own thread, the next
    barrier ends the channel.
    """
    self._ending = channel
    channel._handle.flush(0)  # pyright: ignore[reportPrivateUsage] - asks for it

  def flush(self) -> None:
    try:
      self._wait_for_parts()
    finally:
      one = self._ending
      # A barrier would not wait for it: no record is on its way from a GPU or waits here.
      if one is not None and _callgate.drain_devices(0) and not one.stats()["pending"]:
        one._close(None)  # pyright: ignore[reportPrivateUsage]

  def _wait_for_parts(self) -> None:
    """Waits for the parts of other processes, for Orbax; this process's parts are there."""
    patience: Wait | None = None
    while self._unfinished:
      for run, number in self._unfinished:
        others.is_told(run, number)  # stores the refusal
      self._finish()
      if self._unfinished and (why := others.ended()):
        patience = patience or Wait(_PATIENCE)
        if patience.left <= 0:
          (_, number), _ = self._unfinished.popitem()
          self._unfinished.clear()
          raise RuntimeError(
            f"{self._folder}: the checkpoint of step {number} is incomplete, because {why}; run "
            "the program again with resume=True, which takes the newest complete checkpoint"
          )
      if self._unfinished:
        time.sleep(0.02)

  def _finish(self) -> None:
    """Makes checkpoints of the complete carries."""
    failed: list[Exception] = []
    for (run, number), (leaves, structure, feeds) in list(self._unfinished.items()):

      def rewrite(saved: Saved, structure: Any = structure) -> InOrbax | None:
        try:
          return orbax.write(saved, structure) if self._format == "orbax" else None
        except Exception as error:  # noqa: BLE001 - its parts are complete
          # At exit, when Orbax can't start threads.
          if "after interpreter shutdown" not in str(error):
            failed.append(error)
          return None

      refused = functools.partial(others.is_told, run)
      over = others.is_known(run) or others.is_known(run, number)
      try:
        made = files.finish(self._folder, number, run, leaves, feeds, refused, rewrite)
        if made is not None:
          files.keep_newest(self._folder, self._keep)
          over = True
      except OSError as error:
        others.refuse(run, number)
        failed.append(error)
        over = True
      if over:
        del self._unfinished[run, number]
    for error in failed:
      raise error

  close = flush


def leaves_of(carry: Any, *, canonical: bool = True) -> tuple[Leaf, ...]:
  """Describes a carry's arrays, as taps send them.

  `canonical`: in JAX's dtypes, which have 32 bits without `jax_enable_x64`.
  """
  found: list[Leaf] = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
    array = leaf if hasattr(leaf, "dtype") else jax.eval_shape(jnp.asarray, leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      array = jax.eval_shape(jax.random.key_data, array)
    # The dtype in which JAX carries it.
    dtype = np.dtype(bool) if array.dtype == jax.dtypes.float0 else array.dtype
    dtype = tracing.canonical_dtype(dtype) if canonical else dtype
    name = jax.tree_util.keystr(path) or "carry"
    found.append(Leaf(name, tuple(array.shape), dtypes.carrier(dtype).name))
  return tuple(found)


def _parts_of(carry: Any, info: TapInfo) -> tuple[list[Leaf], dict[int, tuple[Slices, Any]]]:
  """Returns the leaves of a carry in a record, and this device's parts.

  The first of several devices with the same part writes it.
  """
  leaves: list[Leaf] = []
  parts: dict[int, tuple[Slices, Any]] = {}
  arrays, names = jax.tree.leaves(carry), [leaf.name for leaf in leaves_of(carry)]
  shards, extents, first = None, None, None
  if info.shard is not None:
    shards = jax.tree.leaves(info.shard[2], is_leaf=is_part)
    extents = jax.tree.leaves(info.global_shape[2], is_leaf=_is_shape)
    first = jax.tree.leaves(info.first[2])
  for i, array in enumerate(arrays):
    shape = tuple(extents[i]) if extents is not None else array.shape
    part = shards[i] if shards is not None else (slice(None),) * array.ndim
    part = tuple(slice(*s.indices(n)[:2]) for s, n in zip(part, shape, strict=True))
    array = array.astype(dtypes.carrier(array.dtype), copy=False)
    leaves.append(Leaf(names[i], shape, array.dtype.name))
    if first is None or first[i]:
      parts[i] = part, array
  return leaves, parts


def _is_first(info: TapInfo) -> bool:
  """True for the device that writes a carry without arrays."""
  return info.first is None or bool(jax.tree.leaves(info.first)[0])


def _is_shape(x: Any) -> bool:
  return isinstance(x, tuple) and all(isinstance(n, int) for n in x)
