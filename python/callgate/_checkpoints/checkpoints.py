# SPDX-License-Identifier: Apache-2.0
"""`callgate.Checkpoints`: a loop's carry saved while the loop runs, and taken up again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from callgate._checkpoints import files, loading, orbax
from callgate._checkpoints.parts import Saved
from callgate._checkpoints.saver import CarrySaver
from callgate._checkpoints.writer import leaves_of
from callgate._core import options
from callgate._core.opened import based
from callgate._core.pickling import Stays
from callgate._core.public import Closing, Public


class Checkpoints(Stays, Public[CarrySaver], Closing):
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
    folder: where they go; it is made if it isn't there. A relative one is of the open `run`.
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

  _stays = (
    "its thread writes for this process; expected cg.Checkpoints(folder, ...) in the other one"
  )

  def __init__(
    self, folder: str | os.PathLike[str], *, every: int = 1000, keep: int = 3, resume: bool = False,
    format: Literal["npz", "orbax"] = "npz",
  ) -> None:  # fmt: skip
    label = "Checkpoints"
    path = Path(based(options.path(label, "folder", folder))).absolute()
    if "\n" in str(path):  # programs and messages name it in one line
      options.refuse(label, "folder", "a path without a newline", str(path))
    every = options.count(label, "every", every, least=1, most=2**31 - 1)
    keep = options.count(label, "keep", keep, least=1)
    resume = options.boolean(label, "resume", resume)
    options.choice(label, "format", format, ("npz", "orbax"))
    if format == "orbax":
      orbax.library()
    super().__init__(CarrySaver(path, every, keep, resume=resume, format=format))

  @property
  def folder(self) -> Path:
    """The folder, as an absolute path."""
    return self._core.folder

  @property
  def every(self) -> int:
    """As given: steps from one checkpoint to the next."""
    return self._core.every

  @property
  def keep(self) -> int:
    """As given: how many of the newest stay."""
    return self._core.keep

  @property
  def resume(self) -> bool:
    """As given."""
    return self._core.resume

  @property
  def format(self) -> str:
    """As given: "npz" or "orbax"."""
    return self._core.format

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
    self._core.flush()


def _in_its_dtype(array: Any, given: Any) -> Any:
  """The saved array, perhaps of a wider dtype, in that of the carry; of random keys their bits."""
  dtype = getattr(given, "dtype", array.dtype)
  is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
  return array if is_key else array.astype(dtype, copy=False)
