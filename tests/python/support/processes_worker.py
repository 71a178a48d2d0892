# SPDX-License-Identifier: Apache-2.0
"""One process of the groups that process/test_group.py starts: runs the cases, reports what it saw.

Arguments: index, number of processes, the coordinator's port, and how the group ends.
"""

from __future__ import annotations

import io
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from process_groups import report

import callgate as cg

INDEX, COUNT, PORT = (int(argument) for argument in sys.argv[1:4])
ENDING = sys.argv[4]


@cg.gate(out=lambda x: x)
def reversed_sine(x):
  return np.sin(x)[::-1]


def over_all_devices(function):
  """The jitted function of shards, and its argument: 0, 1, 2, ... over the global mesh."""
  mesh = Mesh(np.array(jax.devices()), "x")
  sharding = NamedSharding(mesh, P("x"))
  whole = np.arange(4.0 * len(jax.devices()), dtype=np.float32)
  x = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
  program = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
  return jax.jit(program), x, whole


def local_rows(x):
  """(first global index, values) of each shard that this process holds."""
  shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
  return [[shard.index[0].start or 0, np.asarray(shard.data).tolist()] for shard in shards]


def calls():
  """Gates, kernels and taps on the shards of this process, with a collective between them."""
  blend = cg.elementwise("T x, T y", "T z", "z = x + 2 * y")
  seen = []

  def shards(x):
    cg.tap(x, lambda v, info: seen.append([info.process, info.device, v.tolist()]), name="shard")
    cg.tap({"first": x[0]}, "run", name="first")
    total = jax.lax.psum(jnp.sum(x), "x")
    return blend(reversed_sine(x), x) + total

  program, x, whole = over_all_devices(shards)
  mine = [device.id for device in jax.local_devices()]
  sinks = [cg.sinks.Stream("run-{process}.cgs"), cg.sinks.JSONL("lines-{process}.jsonl"),
           cg.sinks.CSV("table-{process}.csv")]  # fmt: skip
  with cg.channel("run", to=sinks):
    for _ in range(3):
      y = program(x)
    cg.barrier(all_processes=True)
  parts = np.split(whole, len(jax.devices()))
  expected = np.concatenate([np.sin(p)[::-1] + 2 * p for p in parts]) + whole.sum()
  close = [np.allclose(row, expected[i : i + 4], rtol=1e-5) for i, row in local_rows(y)]
  report(devices=mine, close=close, shards=sorted(seen), place=[INDEX, jax.process_index()])


def partitioned():
  """The same without a shard_map: XLA partitions the program, and callgate's calls in it."""
  called, ranks, ordered = [], [], []

  def double(x):
    called.append(list(x.shape))
    return 2 * x

  def whole(x):
    called.append(["whole", INDEX])
    return np.cumsum(x, 0)

  def meet_ranks(context, out, x):
    ranks.append([context.rank, context.size, context.coordinates["x"], context.device])
    out[...] = x

  double = cg.gate(double, out=lambda x: x, sharding="shard", effect="io")
  whole = cg.gate(whole, out=lambda x: x, effect="io")
  together = cg.gate(
    meet_ranks, out=lambda x: x, style="context", sharding="shard", collective=True
  )
  weigh = cg.elementwise("T x, T w", "T z", "z = x * w")
  rows = 2 * len(jax.devices())
  values = np.arange(4.0 * rows, dtype=np.float32).reshape(rows, 4)
  mesh = Mesh(np.array(jax.devices()), "x")
  x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda i: values[i])

  @jax.jit
  def program(x):
    cg.tap(x, "shards")
    cg.tap(x.sum(), "shards", name="total")
    for step in range(3):
      cg.tap(x[0, 0] + step, lambda v, info: ordered.append(float(v)), ordered=True, name="step")
    return double(x) + weigh(x, x), whole(x), together(x).sum()

  with cg.channel("shards", to=cg.sinks.Stream("shards-{process}.cgs")):
    y, cumulated, total = jax.block_until_ready(program(x))
    cg.barrier(all_processes=True)
  right = [
    np.array_equal(shard.data, want[shard.index])
    for got, want in ((y, 2 * values + values**2), (cumulated, np.cumsum(values, 0)))
    for shard in got.addressable_shards
  ]
  report(right=right, called=sorted(called, key=str), ranks=sorted(ranks), ordered=ordered)
  report(total=bool(float(total) == values.sum()), rows=rows)

  @cg.gate(out=lambda x: x, sharding="shard", name="worker.fails on a shard")
  def fails_here(x):
    if INDEX == 1:
      raise KeyError("shard of process 1")
    return x

  y = jax.jit(lambda x: fails_here(x).sum())(x)  # a collective follows: nothing hangs
  report(one_shard=meet(), after_one_shard=meet(), poisoned=bool(np.isnan(float(y))))


def feeds():
  """A feed over all devices: each process runs the iterator, each device takes its share."""
  mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  whole = np.arange(4.0 * len(jax.devices()), dtype=np.float32).reshape(-1, 4)
  with cg.feed((whole + 100 * i for i in range(6)), sharding=rows) as feed:

    @jax.jit
    def program():
      step = lambda total, _: (total + feed.next().sum(), None)
      return feed.next(), jax.lax.scan(step, 0.0, length=2)[0]

    first, total = program()
    outside = next(feed)
    own = [np.array_equal(row, whole[i : i + 1]) for i, row in local_rows(first)]
    later = [np.array_equal(row, whole[i : i + 1] + 300) for i, row in local_rows(outside)]
    served = feed.stats()["served"]
  expected = 2 * whole.sum() + whole.size * 300
  report(fed=[own, later, float(total) == float(expected), served])


def bars():
  """Reports the drawing of progress bars in this process."""
  drawn = io.StringIO()
  progress = cg.Progress(desc="steps", file=drawn)
  loop = jax.jit(lambda: cg.fori_loop(0, 50, lambda i, c: c + i, 0, progress=progress))
  report(sum=int(loop()))
  cg.barrier()
  report(drawn=drawn.getvalue())


def outcome(call, *arguments, **options):
  """How a call ends, as what can be reported."""
  begun = time.monotonic()
  try:
    call(*arguments, **options)
  except cg.ProcessError as error:
    notes = "".join(getattr(error, "__notes__", ()))
    result = ["ProcessError", error.process, error.kind, error.message, notes]
  except (ValueError, OSError, KeyError) as error:
    result = [type(error).__name__, str(error)]
  else:
    result = ["fine"]
  return [*result, time.monotonic() - begun]


def meet():
  return outcome(cg.barrier, all_processes=True)


def wait_for(*names):
  while not all(pathlib.Path(name).exists() for name in names):
    time.sleep(0.02)


def raising(value):
  raise ValueError(f"bad record {value}")


@cg.gate(out=lambda x: x, name="worker.fails", effect="io")
def fails(x):
  raise OSError("no such sensor")


def barriers():
  """Barriers that hold, and failures of one process in them."""
  if INDEX == 1:
    time.sleep(0.5)  # comes last, mostly; the barrier has to hold either way
  pathlib.Path(f"here-{INDEX}").touch()
  first = meet()
  report(first=first, all_were_here=all(pathlib.Path(f"here-{i}").exists() for i in range(COUNT)))
  if INDEX == 1:
    cg.tap(jnp.float32(7), raising)
  report(consumer=meet(), after_consumer=meet())
  if INDEX == COUNT - 1:  # on several devices the exception waits for the barrier
    mesh = Mesh(np.array(jax.local_devices()), "x")
    jax.jit(jax.shard_map(fails, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(np.ones(2))
  report(gate=meet(), after_gate=meet())
  if INDEX == 0:
    report(late=outcome(cg.barrier, timeout=0.5, all_processes=True))
    pathlib.Path("late").touch()
  else:
    wait_for("late")
    report(late=meet())
  report(after_late=meet())


def end_by_exception():
  """Process 1 raises where the others are in a collective; they learn of it all the same."""
  program, x, _ = over_all_devices(lambda x: x + jax.lax.psum(x, "x"))
  if INDEX == 1:
    raise RuntimeError("gone for good")
  y = program(x)
  end = meet()
  report(end=end, again=meet(), stuck=not y.is_ready())
  leave()


def end_by_death():
  """The last process dies without a word."""
  if INDEX == COUNT - 1:
    os._exit(9)
  report(end=meet())
  leave()


def leave():
  """Ends at once: at its own end JAX would wait for the process that is gone."""
  pathlib.Path(f"left-{INDEX}").touch()
  if INDEX == 0:  # the coordinator goes last
    wait_for(*(f"left-{i}" for i in range(COUNT) if pathlib.Path(f"here-{i}").exists()
               and i != (1 if ENDING == "exception" else COUNT - 1)))  # fmt: skip
  os._exit(0)


def main():
  jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, INDEX)
  calls()
  partitioned()
  feeds()
  bars()
  barriers()
  {"exception": end_by_exception, "death": end_by_death, "well": lambda: report(end=meet())}[
    ENDING
  ]()


if __name__ == "__main__":
  main()
