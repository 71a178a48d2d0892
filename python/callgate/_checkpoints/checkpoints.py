# SPDX-License-Identifier: Apache-2.0
"""`callgate.Checkpoints`: saves a loop's carry while the loop runs, and resumes from it."""

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
  cg.barrier()                                  # all checkpoints are on the disk now
  assert cg.Checkpoints(folder).steps() == (60, 90, 100)
  x, xs = run(cg.Checkpoints(folder, resume=True))  # no steps are left
  assert x == 100 and not xs.any()
  ```

  - A tap sends the carry after every `every` steps and after the last step that runs. Another
    thread writes it. The program waits only for the copy, unless the disk stays slower than the
    loop.
  - An incomplete checkpoint is never visible, even after `kill -9`.
  - The processes of a multi-host program share the folder. Each part of an array is written once,
    by the first device that has it. You may resume with another number of devices and processes.
    The newest checkpoint is complete after `callgate.barrier(all_processes=True)`.
  - If a checkpoint can't be written, the loop continues, and `callgate.barrier()` raises the error.
  - As a context manager it waits for the disk at the end of the block. Its thread ends when neither
    your code nor a program refers to the `Checkpoints`.

  Args:
    folder: the folder of the checkpoints, which is made if needed. A relative path is relative to
      the open `run`'s folder.
    every: the number of steps between two checkpoints.
    keep: the number of newest checkpoints to keep.
    resume: starts from the newest checkpoint, if there is one. Skipped steps don't run, and their
      ys are zeros. Such a loop has no reverse-mode derivative. Without `resume`, a loop refuses a
      folder with checkpoints of an earlier run.
    format: "npz": NumPy files, one for each device with a part. "orbax": a checkpoint that Orbax
      restores; one process gathers the parts in its memory. You can resume from both.

  Raises:
    GateDefinitionError: an option is wrong, or Orbax is not installed.
    FileExistsError: (fails the program) without `resume`, the folder has checkpoints.
    GateError: (fails the program) the newest checkpoint has another carry, or more steps than the
      loop.
  """

  _stays = (
    "its thread writes for this process; make a new cg.Checkpoints(folder, ...) in the other "
    "process"
  )

  def __init__(
    self, folder: str | os.PathLike[str], *, every: int = 1000, keep: int = 3, resume: bool = False,
    format: Literal["npz", "orbax"] = "npz",
  ) -> None:  # fmt: skip
    label = "Checkpoints"
    path = Path(based(options.path(label, "folder", folder))).absolute()
    if "\n" in str(path):  # programs and messages show it on one line
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
    """The number of steps between two checkpoints."""
    return self._core.every

  @property
  def keep(self) -> int:
    """The number of newest checkpoints to keep."""
    return self._core.keep

  @property
  def resume(self) -> bool:
    """The option `resume`."""
    return self._core.resume

  @property
  def format(self) -> str:
    """The option `format`: "npz" or "orbax"."""
    return self._core.format

  def __repr__(self) -> str:
    return f"<Checkpoints in {self.folder}>"

  def steps(self) -> tuple[int, ...]:
    """Returns the steps of the complete checkpoints in the folder, the newest last."""
    return tuple(saved.step for saved in files.whole(self.folder))

  def load(self, like: Any, step: int | None = None) -> Any:
    """Reads a checkpoint outside of programs.

    Args:
      like: a pytree with the carry's arrays, or their types.
      step: the checkpoint's step. Default: the newest checkpoint.

    Returns:
      The carry as a pytree of NumPy arrays. A random key is the array of its bits.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint has another carry, or is damaged.
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
    """Returns the checkpoint of a step, or the newest one."""
    found = files.whole(self.folder)
    newest = found[-1].step if found else -1
    chosen = [saved for saved in found if step in (None, saved.step)]
    for folder, number in files.damaged(self.folder, found):
      if number == step or (step is None and number > newest):
        other = f"; step {newest} is intact: pass step={newest}" if found else ""
        raise ValueError(f"{folder}: expected an intact checkpoint, got a damaged one{other}")
    if not chosen:
      what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
      raise FileNotFoundError(f"{self.folder}: expected {what}, got steps {self.steps()}")
    return chosen[-1]

  def close(self) -> None:
    """Waits until the checkpoints of all programs so far are on the disk.

    The end of the process waits for them, too. A program that you call later saves again.

    Raises:
      OSError: a file could not be written.
    """
    self._core.flush()


def _in_its_dtype(array: Any, given: Any) -> Any:
  """Converts a saved array to the carry's dtype; a random key to its bits."""
  dtype = getattr(given, "dtype", array.dtype)
  is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
  return array if is_key else array.astype(dtype, copy=False)
