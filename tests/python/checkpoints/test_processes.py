# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a program over several processes, which share a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_processes import assert_whole, body, init, mesh_of
from process_groups import run_group

import callgate as cg
from callgate._checkpoints import files, parts

SCRIPT = Path(__file__).parents[1] / "support" / "checkpoint_processes.py"


def go_on(folder: Path, devices: int, steps: int) -> None:
  """Goes on from the newest checkpoint, in this process."""
  saves = cg.Checkpoints(folder, every=3, keep=2, resume=True)
  newest = max(cg.Checkpoints(folder).steps(), default=0)
  program = jax.jit(lambda c: cg.scan(body, c, length=newest + steps, save=saves))
  carry, ys = program(init(mesh_of(devices)))
  cg.barrier()
  assert carry["n"] == newest + steps
  np.testing.assert_array_equal(np.asarray(ys) != 0, np.arange(newest + steps) >= newest)
  assert assert_whole(folder)[-1] == newest + steps


@pytest.mark.parametrize(("killed", "form"), [(1, "npz"), (0, "orbax")])
def test_processes_share_a_folder(tmp_path: Path, killed: int, form: str) -> None:
  """Saved by one, gone on with by several, one of which is killed, gone on with by one."""
  if form == "orbax":
    pytest.importorskip("orbax.checkpoint")
  folder = tmp_path / "checkpoints"
  go_on(folder, 8 if killed else 1, 4)
  group = run_group(SCRIPT, 2, str(folder), form, str(killed), folder=tmp_path)
  for index, ended in enumerate(group):
    said = ended.reports
    assert ended.status == (-signal.SIGKILL if index == killed else 0), ended.errors
    assert said["before"] == [3, 4]
    assert said["n"] == 9
    assert said["ran"] == [False] * 4 + [True] * 5
    assert said["steps"] == [6, 8, 9]
    # Two devices have each half of "w", the third leaf; the first has all that is replicated.
    parts = {"part_00000": ["0", "1", "2"], "part_00001": ["2"]}
    assert said["parts"] == (parts if form == "npz" else {})
    assert said["while_held"] == 9
    assert said["unfinished"] == [f".step_00000000{step}" for step in (10, 11, 12)]
    assert said["released"] == [10, 11, 12]
    assert said.get("full") == ("the disk is full" if index == 1 else None)
    assert said["after_full"] == said["after_refused"] == [10, 11, 12, 14]
    assert "expected a checkpoint of this carry" in said["refused"]
  assert assert_whole(folder)[-1] >= 17
  go_on(folder, 2 if killed else 8, 5)


class Killed(BaseException):
  pass


LEAVES = (parts.Leaf("['v']", (), "int32"), parts.Leaf("['w']", (4, 100), "float32"))


def test_an_end_of_either_of_two_writers_at_each_moment(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Ends one writer at its first change of the disk, its second one, and so on."""
  left = 10**9

  def counted(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
      nonlocal left
      left -= 1
      if left < 0:
        raise Killed
      return function(*args, **kwargs)

    return call

  for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open")):
    monkeypatch.setattr(owner, name, counted(getattr(owner, name)))

  def write(process: int, step: int, run: int) -> None:
    rows = slice(2 * process, 2 * process + 2)
    parts: dict[int, Any] = {1: ((rows, slice(0, 100)), np.full((2, 100), step, np.float32))}
    if process == 0:
      parts[0] = (), np.int32(step)
    files.write(tmp_path, step, run, f"part_{process:05d}_00000", parts)
    if files.finish(tmp_path, step, run, LEAVES) is not None:
      files.keep_newest(tmp_path, 2)

  def reached() -> int:
    saves = cg.Checkpoints(tmp_path)
    for step in saves.steps():
      v, w = saves.load({"v": np.int32(0), "w": np.zeros((4, 100), np.float32)}, step).values()
      assert v == step
      assert (w == step).all()
    return max(saves.steps(), default=0)

  run = 0
  for moment in range(14):
    for dies in range(2):
      run += 1
      files.clean(tmp_path)
      start = reached()
      for step in range(start + 1, start + 3):
        order = (0, 1) if (run + step) % 3 else (1, 0)
        ended = False
        for process in order:
          left = moment if process == dies else 10**9
          try:
            write(process, step, run)
          except Killed:
            ended = True
        left = 10**9
        if ended:
          break
      assert reached() in (step - 1, step)
      assert ended or reached() == step
      # The other one has written its part of the step beyond, and the run can't be completed.
      write(1 - dies, step + 1, run)
      assert reached() <= step
  files.clean(tmp_path)
  assert all(path.name.startswith("step_") for path in tmp_path.iterdir())


def test_two_that_find_the_parts_complete_make_one_checkpoint(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Another process is as far when this one has seen that all is there."""
  for process in (0, 1):
    rows = slice(2 * process, 2 * process + 2), slice(0, 100)
    whole = {0: ((), np.int32(1)), 1: (rows, np.ones((2, 100), np.float32))}
    files.write(tmp_path, 1, 7, f"part_{process:05d}_00000", whole)
  complete, made = parts.is_complete, list[Any]()

  def both(folder: Path, leaves: Any) -> bool:
    found = complete(folder, leaves)
    if found and not made:
      made.append(None)
      made.append(files.finish(tmp_path, 1, 7, LEAVES))
    return found

  monkeypatch.setattr(parts, "is_complete", both)
  assert files.finish(tmp_path, 1, 7, LEAVES) is None
  assert made[1] == tmp_path / "step_0000000001"
  assert cg.Checkpoints(tmp_path).steps() == (1,)
  assert [path.name for path in tmp_path.iterdir()] == ["step_0000000001"]
