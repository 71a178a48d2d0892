# SPDX-License-Identifier: Apache-2.0
"""One process of the groups that checkpoints/test_processes.py starts.

Arguments: index, number of processes, the coordinator's port, the folder of checkpoints, their
format, which process is killed at the end.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from process_groups import report

import callgate as cg
from callgate._checkpoints import files

ROWS = 12


def body(carry: Any, _: Any) -> Any:
  carry = {"w": carry["w"] + 1, "v": carry["v"] * 0.5 + 1, "n": carry["n"] + 1}
  return carry, carry["w"].sum()  # a collective: the processes keep step


def init(mesh: Any) -> Any:
  """The carry before the first step: split along "a", replicated along "b"; whole; a number."""

  def split(whole: Any, spec: Any) -> Any:
    sharding = jax.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

  w = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)
  return {
    "w": split(w, jax.P("a")),
    "v": split(np.zeros(4, np.float32), jax.P()),
    "n": split(np.zeros((), np.int32), jax.P()),
  }


def mesh_of(count: int) -> Any:
  devices = np.array(jax.devices()[:count])
  return jax.sharding.Mesh(devices.reshape((-1, 2) if count > 1 else (1, 1)), ("a", "b"))


def run(saves: Any, carry: Any, length: int, body: Any = body) -> Any:
  program = jax.jit(lambda c: cg.scan(body, c, length=length, save=saves))
  return jax.block_until_ready(program(carry))


def assert_whole(folder: Any) -> tuple[int, ...]:
  """The steps that are there, each of which has what the loop had then."""
  saves = cg.Checkpoints(folder)
  like = {
    "w": np.zeros((ROWS, 2), np.float32), "v": np.zeros(4, np.float32), "n": np.int32(0),
  }  # fmt: skip
  for step in saves.steps():
    found = saves.load(like, step)
    assert found["n"] == step
    np.testing.assert_array_equal(found["w"], np.arange(2.0 * ROWS).reshape(ROWS, 2) + step)
    np.testing.assert_allclose(found["v"], 2 - 0.5 ** (step - 1.0), rtol=1e-6)
  return saves.steps()


def local(x: Any) -> Any:
  return np.asarray(x.addressable_data(0)).tolist()


def main() -> None:
  index, count, port = (int(argument) for argument in sys.argv[1:4])
  folder, form, killed = pathlib.Path(sys.argv[4]), sys.argv[5], int(sys.argv[6])
  jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
  mesh = mesh_of(jax.device_count())
  saves = lambda **options: cg.Checkpoints(folder, format=form, **options)

  # From where another number of processes was.
  before = cg.Checkpoints(folder).steps()
  cg.barrier(all_processes=True)
  carry, ys = run(saves(every=2, keep=3, resume=True), init(mesh), 9)
  cg.barrier(all_processes=True)
  ran = [bool(y) for y in np.asarray(ys.addressable_data(0))]
  report(before=before, n=local(carry["n"]), ran=ran, steps=assert_whole(folder))
  parts = (folder / "step_0000000009").glob("part_*.json")
  report(parts={path.name[:10]: sorted(json.loads(path.read_text())["parts"]) for path in parts})

  # The program goes on while a process has yet to write; nothing is whole until it has.
  written, held = files.write, threading.Event()
  if index == count - 1:
    files.write = lambda *args: (held.wait(), written(*args))[1]
  run(saves(every=1, keep=3, resume=True), init(mesh), 12)
  while index != count - 1 and len(list(folder.glob(".step*/part_00000*.json"))) < 3:
    time.sleep(0.001)  # until this process's parts are on the disk
  sync_global_devices("written")
  report(while_held=assert_whole(folder)[-1])
  report(unfinished=sorted(path.name[:16] for path in folder.glob(".step*")))
  sync_global_devices("looked")
  held.set()
  cg.barrier(all_processes=True)
  files.write = written
  report(released=assert_whole(folder))

  # A process that can't write its part: the step is none, and nobody waits for it.
  def full(folder: Any, step: int, *args: Any) -> None:
    if step == 13:
      raise OSError("the disk is full")
    written(folder, step, *args)

  files.write = full if index == count - 1 else written
  run(saves(every=1, keep=9, resume=True), init(mesh), 14)
  try:
    cg.barrier()
  except OSError as error:
    report(full=str(error))
  sync_global_devices("full")
  files.write = written
  report(after_full=assert_whole(folder))

  # A carry that is none of the checkpoint's: its run saves nothing.
  try:
    other = {**init(mesh), "v": np.zeros(5, np.float32)}
    with cg.errors():
      run(saves(every=1, resume=True), other, 20)
  except ValueError as error:
    report(refused=str(error))
  cg.barrier(all_processes=True)
  report(after_refused=assert_whole(folder))

  cg.barrier(all_processes=True)
  threading.Thread(target=end, args=(folder, index == killed), daemon=True).start()
  run(saves(every=1, keep=2, resume=True), init(mesh), 1_000_000)


def end(folder: pathlib.Path, dies: bool) -> None:
  """Kills one process while the loop runs; the others, which are in a collective, end."""
  sign = folder.parent / "killed"
  if dies:
    reached = max(cg.Checkpoints(folder).steps())
    while max(cg.Checkpoints(folder).steps(), default=0) < reached + 3:
      time.sleep(0.001)
    sign.touch()
    os.kill(os.getpid(), signal.SIGKILL)
  while not sign.exists():
    time.sleep(0.001)
  os._exit(0)


if __name__ == "__main__":
  main()
