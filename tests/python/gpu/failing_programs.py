# SPDX-License-Identifier: Apache-2.0
"""Programs in which one call of CUDA's driver fails: run by test_faults.py, on a virtual GPU.

Reads a line of JSON for each case, and answers with one. A case has:

  program: which of PROGRAMS.
  faults: [function, result, after, count, thread] of each, see failing_driver.c.
  first: the program's first run meets the faults, else its second.
  new_size: its arrays have a size of their own, so that no memory is kept for them.
  before: a program that runs before, twice.
  recompiled: the run without faults is one of a new program.

The answer:

  error: what the run with the faults raised.
  value: "right", "wrong" or "none", what it gave.
  records: the same of its taps. counts: "sent", "delivered" and "dropped" of their channel.
  failed: how often each function failed. calls: how often callgate called each.
  next: the first four of the next run, without faults.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import drop_programs

import callgate as cg

SMALL, LARGE = 300, 100_000  # elements: a tap's copy goes with the program's stream, or aside
RECORDED = 8  # calls of a program that is to be a graph: XLA wants five

_NUMBERS, _SIZES = itertools.count(), itertools.count()


@dataclasses.dataclass(frozen=True)
class Program:
  """A program, its argument, its results and the records that it has to send."""

  run: Callable[[Any], Any]
  x: Any
  want: Any
  records: Any = None  # None for a program without taps
  channel: Any = None
  seen: Any = dataclasses.field(default_factory=list)


def name() -> str:
  """A new one for each gate, since an old one may still live."""
  return f"faulty_{next(_NUMBERS)}"


def new_size() -> int:
  """Elements of an odd number of MiB that no program has had, nor half of one or the double."""
  return (2 * next(_SIZES) + 3) << 18


def same(x: Any) -> Any:
  return x


def numbers(size: int) -> np.ndarray:
  return (np.arange(size) % 1000).astype(np.float32)


def gate(size: int, **options: Any) -> Program:
  call = cg.gate(lambda x: x + 1, out=same, name=name(), **options)
  x = numbers(size)
  return Program(jax.jit(lambda x: call(x * 2) * 3), x, (x * 2 + 1) * 3)


class Interface:
  """An array that is known by CUDA's array interface alone."""

  def __init__(self, array: Any) -> None:
    self.__cuda_array_interface__ = array.__cuda_array_interface__


def returned(size: int) -> Program:
  call = cg.gate(Interface, out=same, arrays="buffer", name=name())
  x = numbers(size)
  return Program(jax.jit(lambda x: call(x * 2) * 3), x, x * 6)


def recorded_gate(size: int) -> Program:
  """In a CUDA graph."""

  @cg.gate(
    out=same, arrays="buffer", style="inplace", aliases={0: 0}, command_buffer=True, name=name()
  )
  def call(out: Any, x: Any) -> None:
    pass

  def program(x: Any) -> Any:
    for _ in range(RECORDED):
      x = call(x) * 0.5
    return x

  x = numbers(size)
  return Program(jax.jit(program), x, x * np.float32(0.5**RECORDED))


def tap(size: int, **options: Any) -> Program:
  seen: list[Any] = []
  label = name()
  channel = cg.channel(label, to=lambda value: seen.append(np.array(value)))
  call = jax.jit(lambda x: cg.tap(x * 2, channel, name=label, **options) + 1)
  x = numbers(size)
  return Program(call, x, x * 2 + 1, x * 2, channel, seen)


def recorded_tap(size: int) -> Program:
  """In a CUDA graph."""
  seen: list[Any] = []
  label = name()
  channel = cg.channel(label, to=lambda value: seen.append(np.array(value)))

  def program(x: Any) -> Any:
    for _ in range(RECORDED):
      x = jnp.sin(cg.tap(x + 1, channel, name=label, effect="dataflow")) * 0
    return x

  x = numbers(size)
  return Program(jax.jit(program), x, x * 0, x + 1, channel, seen)


def kernel(size: int) -> Program:
  call = cg.elementwise("T x", "T y", "y = x + 1", name=name())
  x = numbers(size)
  return Program(jax.jit(lambda x: call(x * 2) * 3), x, (x * 2 + 1) * 3)


def dropped_kernel(size: int) -> Program:
  """A new one for each run, unloaded at its end."""

  def run(x: Any) -> Any:
    got = np.asarray(kernel(size).run(x))
    drop_programs()
    return got

  x = numbers(size)
  return Program(run, x, (x * 2 + 1) * 3)


def recorded_kernel(size: int) -> Program:
  """In a CUDA graph."""
  call = cg.elementwise("T x", "T y", "y = x + 1", name=name())

  def program(x: Any) -> Any:
    for _ in range(RECORDED):
      x = call(x) * 2
    return x

  x = want = numbers(size)
  for _ in range(RECORDED):
    want = (want + 1) * 2
  return Program(jax.jit(program), x, want)


CLUSTERED = """
__global__ void twice(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 2 * x[i];
}
"""


def clustered_kernel(size: int) -> Program:
  call = cg.cuda(CLUSTERED, grid=12, block=size // 12, cluster=4, out=same, name=name())
  x = numbers(size)
  return Program(jax.jit(lambda x: call(x * 2) * 3), x, x * 12)


SUM = """
__global__ void sums(const float* x, float* y, int n) {
  extern __shared__ float part[];
  part[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  atomicAdd(y, part[n - 1 - threadIdx.x]);
}
"""


def shared_kernel(size: int) -> Program:
  """With more shared memory than a function has without asking, and results set to zero."""
  out = jax.ShapeDtypeStruct((1,), "float32")
  call = cg.cuda(SUM, grid=1, block=size, shared=100 << 10, out=out, zeroed=[0], name=name())
  x = numbers(size)
  return Program(jax.jit(lambda x: call(x, size)), x, x.sum(keepdims=True))


def feed(size: int) -> Program:
  """Checks that an item exceeds `x` by a number that grows, so that none comes twice."""
  x, last = numbers(size), [-1]

  def right(y: np.ndarray) -> bool:
    before, last[0] = last[0], y[0]
    return y[0] > before and bool((y == y[0]).all())

  items = cg.feed((x + np.float32(i) for i in range(1000)), prefetch=1, name=name())
  return Program(jax.jit(lambda x: items.next() - x), x, right)


def on_two_devices(call: Any, size: int) -> Program:
  """With a collective behind the call, for which each device waits for the other."""
  mesh = jax.sharding.Mesh(np.array(jax.devices("cuda")[:2]), ("d",))
  x = jax.device_put(numbers(size), jax.NamedSharding(mesh, jax.P("d")))
  return Program(jax.jit(lambda x: call(x).sum()), x, numbers(size).sum() + size)


def gate_on_two(size: int) -> Program:
  return on_two_devices(cg.gate(lambda x: x + 1, out=same, sharding="i -> i", name=name()), size)


def kernel_on_two(size: int) -> Program:
  return on_two_devices(cg.elementwise("T x", "T y", "y = x + 1", name=name()), size)


PROGRAMS: dict[str, Callable[[int], Program]] = {
  "gate": gate,
  "own": lambda size: gate(size, thread="own"),
  "returned": returned,
  "recorded gate": recorded_gate,
  "tap": tap,
  "large tap": lambda size: tap(max(size, LARGE)),
  "device tap": lambda size: tap(size, on_device=True),
  "recorded tap": lambda size: recorded_tap(min(size, SMALL)),  # no large one is recorded
  "kernel": kernel,
  "dropped kernel": dropped_kernel,
  "recorded kernel": recorded_kernel,
  "clustered kernel": clustered_kernel,
  "shared kernel": shared_kernel,
  "feed": feed,
  "gate on two devices": gate_on_two,
  "kernel on two devices": kernel_on_two,
}


class Driver:
  """callgate's way to CUDA's driver: tests/python/gpu/failing_driver.c."""

  def __init__(self, functions: list[str]) -> None:
    self.functions = functions
    self.library = ctypes.CDLL(os.environ["CALLGATE_CUDA_DRIVER"])

  def set(self, faults: list[Any]) -> None:
    self.library.failing_clear()
    for function, result, after, count, thread in faults:
      self.library.failing_set(function.encode(), result, after, count, ord(thread))

  def counts(self, of: str) -> dict[str, int]:
    counts = {name: getattr(self.library, of)(name.encode()) for name in self.functions}
    return {name: count for name, count in counts.items() if count}


def verdict(got: Any, want: Any) -> str:
  if got is None:
    return "none"
  good = want(got) if callable(want) else bool(np.array_equal(got, want))
  return "right" if good else "wrong"


def run(program: Program) -> dict[str, Any]:
  """One run, and all that can be told of it."""
  told: dict[str, Any] = {"error": "", "value": None}
  stats = {} if program.channel is None else program.channel.stats()
  del program.seen[:]
  try:
    with cg.errors():
      told["value"] = np.asarray(program.run(program.x))
  except Exception as error:  # noqa: BLE001  (told, whatever it is)
    told["error"] = f"{type(error).__name__}: {error}"
  try:
    cg.barrier(timeout=10)
  except Exception as error:  # noqa: BLE001  (told, whatever it is)
    told["error"] += f" | barrier: {type(error).__name__}: {error}"
  told["value"] = verdict(told["value"], program.want)
  if program.channel is not None:
    now = program.channel.stats()
    told["counts"] = {
      key: now[key] - stats[key] for key in ("sent", "delivered", "dropped", "pending")
    }
    told["records"] = verdict(program.seen[0] if program.seen else None, program.records)
  return told


def close(program: Program) -> None:
  if program.channel is not None:
    program.channel.close()


def case(driver: Driver, given: dict[str, Any]) -> dict[str, Any]:
  driver.set([])
  if "before" in given:
    before = PROGRAMS[given["before"]](new_size())
    for _ in range(2):  # a graph is one from its second run on
      run(before)
    close(before)
  size = new_size() if given.get("new_size") else SMALL
  program = PROGRAMS[given["program"]](size)
  if not given.get("first"):
    run(program)
  driver.set(given["faults"])
  told = run(program)
  told["failed"], told["calls"] = driver.counts("failing_failed"), driver.counts("failing_calls")
  driver.set([])
  if given.get("recompiled"):
    close(program)
    program = PROGRAMS[given["program"]](size)
  told["next"] = run(program)
  close(program)
  return told


def main() -> None:
  answers = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)  # what else is printed is no answer
  driver = Driver(sys.argv[1:])
  jax.config.update("jax_default_device", jax.devices("cuda")[0])
  for line in sys.stdin:
    print(json.dumps(case(driver, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
  main()
