# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are closed or dropped: later calls save, all is written, threads end."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from programs import drop_programs, drop_programs_until
from waiting import until

import callgate as cg
from callgate._checkpoints import files
from callgate._core.public import core


def test_a_program_that_is_called_after_the_block_saves_again(engine: str, tmp_path: Path) -> None:
  large = np.zeros(1 << 19, np.float32)  # more than waits for a channel that isn't open
  with cg.Checkpoints(tmp_path, every=2) as saves:
    program = jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=6, save=saves)[0])
    program(large)
  for call in range(1, 4):
    program(large + 100 * call)
    (saves.close if call == 1 else cg.barrier)()
    assert saves.steps() == (2, 4, 6)
    np.testing.assert_array_equal(saves.load(large), large + 100 * call + 6)


def test_close_raises_what_could_not_be_written_after_the_block(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  with cg.Checkpoints(tmp_path, every=2) as saves:
    program = jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=2, save=saves)[0])
  monkeypatch.setattr(
    files, "write", lambda *_: Path("/dev/full").write_text("more than fits", encoding="utf-8")
  )
  for wait in (saves.close, cg.barrier):
    program(0)
    with pytest.raises(OSError, match="No space left"):
      wait()


def threads() -> set[str]:
  """The threads that write checkpoints."""
  comms = Path("/proc/self/task").glob("*/comm")
  return {comm.parent.name for comm in comms if comm.read_text().startswith("cg:checkpoints")}


@pytest.mark.parametrize("use", ["never", "runs", "block"])
def test_checkpoints_that_nobody_can_save_with_end_their_thread(
  engine: str, tmp_path: Path, clean_caches: None, use: str
) -> None:
  def once(folder: Path) -> None:
    saves = cg.Checkpoints(folder, every=2)
    program = jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=4, save=saves)[0])
    lowered = program.lower(0)
    if use == "block":
      with saves:
        program(0)
    elif use == "runs":
      program(0)
      cg.barrier()
    until(lambda: bool(threads() - before))  # the thread names itself
    del lowered

  before = threads()
  for folder in (tmp_path / "a", tmp_path / "b"):
    once(folder)
    drop_programs_until(lambda: threads() <= before)


def test_a_barrier_waits_for_what_was_sent_where_nobody_is_left(
  tmp_path: Path, clean_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
  def once() -> None:
    saves = cg.Checkpoints(tmp_path, every=1, keep=9)
    alive.append(weakref.ref(core(saves)._loader))
    jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=9, save=saves)[0])(0)

  def written(*args: Any) -> None:
    free.wait(60)
    write(*args)

  alive: list[Any] = []
  before, write, free = threads(), files.write, threading.Event()
  monkeypatch.setattr(files, "write", written)
  once()
  drop_programs_until(lambda: alive[0]() is None)
  assert cg.Checkpoints(tmp_path).steps() == ()
  with pytest.raises(TimeoutError):
    cg.barrier(0.1)
  free.set()
  cg.barrier()
  assert cg.Checkpoints(tmp_path).steps() == tuple(range(1, 10))
  until(lambda: threads() <= before)


def test_a_program_keeps_the_thread_that_saves(tmp_path: Path, clean_caches: None) -> None:
  before, saves = threads(), cg.Checkpoints(tmp_path, every=2)
  loop = lambda x, saves=saves: cg.scan(lambda c, _: (c + 1, None), x, length=4, save=saves)[0]
  program = jax.jit(loop).lower(0).compile()
  del loop, saves
  drop_programs()
  for first in (10, 20):
    program(first)
    cg.barrier()
    assert cg.Checkpoints(tmp_path).load(0) == first + 4
  del program
  drop_programs_until(lambda: threads() <= before)
