# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that tests run in worker processes, which import them from here."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import Any

import numpy as np


def add(x: Any, plus: float = 1) -> Any:
  return x + np.float32(plus)


def add_to_small(x: Any, plus: float = 1) -> Any:
  if x == 7:
    raise LookupError("too large")
  return add(x, plus)


def pid(x: Any) -> Any:
  del x
  return np.int32(os.getpid())


def meet(x: Any, *, folder: str, count: int = 2) -> Any:
  """This process's number, as soon as so many processes have come to the folder."""
  del x
  (pathlib.Path(folder) / str(os.getpid())).touch()
  end = time.monotonic() + 60
  while len(os.listdir(folder)) < count:
    assert time.monotonic() < end, f"the others didn't come: {os.listdir(folder)}"
    time.sleep(0.005)
  return np.int32(os.getpid())


def dawdle(x: Any, *, folder: str) -> Any:
  """Takes 50 ms, unless the folder has a file "done"; leaves a file for each call."""
  (pathlib.Path(folder) / f"call-{int(x)}").touch()
  if not (pathlib.Path(folder) / "done").exists():
    time.sleep(0.05)
  return x


def die(x: Any) -> Any:
  """Ends its process by the signal x, or with the exit code -x."""
  print("last words", file=sys.stderr, flush=True)
  if x < 0:
    os._exit(int(-x))
  os.kill(os.getpid(), int(x))
  time.sleep(60)
  return x


def sleep(x: Any) -> Any:
  time.sleep(float(x))
  return x


class Unpicklable(Exception):
  """One whose pickle can't be made again."""

  def __init__(self, one: int, two: int) -> None:
    super().__init__(f"{one} and {two}")


class Fails:
  def __init__(self) -> None:
    raise ValueError("no object")

  def __call__(self, x: Any) -> Any:
    return x


class Counter:
  """Counts its calls; where it is one a lane, each lane's."""

  def __init__(self, start: int = 0) -> None:
    self.count = start

  def __call__(self, x: Any) -> Any:
    self.count += 1
    return np.float32(x + self.count)

  def step(self, x: Any, y: Any) -> Any:
    self.count += 10
    return {"count": np.int32(self.count), "sum": np.float32(x + y)}

  def where(self, x: Any) -> Any:
    del x
    return np.int32(os.getpid())


COUNTER_OUTS = {
  "__call__": np.float32(0), "step": {"count": np.int32(0), "sum": np.float32(0)},
  "where": np.int32(0),
}  # fmt: skip


class Tallied:
  """Knows a number; its process counts how many live, and the most that ever did."""

  live = most = 0

  def __init__(self, value: Any) -> None:
    self.value = np.float32(value)
    Tallied.live += 1
    Tallied.most = max(Tallied.most, Tallied.live)

  def __del__(self) -> None:
    type(self).live -= 1


def tallied() -> Any:
  return np.int32(Tallied.live)


def most_tallied() -> Any:
  return np.int32(Tallied.most)


def value_of(box: Tallied, plus: Any) -> Any:
  return np.float32(box.value + plus)


class Marks:
  """Leaves a file when it ends."""

  def __init__(self, path: str) -> None:
    self.path = path

  def __del__(self) -> None:
    pathlib.Path(self.path).touch()


def die_once(x: Any, *, path: str) -> Any:
  """Ends its process, where the file is not there yet."""
  if not pathlib.Path(path).exists():
    pathlib.Path(path).touch()
    os._exit(1)
  return x


def key_of(key: Any) -> Any:
  """Another key of a key, and a number."""
  import jax  # a worker has it where its arrays are jax.Arrays

  return jax.random.split(key, 3)[1], jax.random.uniform(key)
