# SPDX-License-Identifier: Apache-2.0
"""The ways to run a program, as text: what stands before it in its file, and behind.

Each file runs by itself. It leaves in `calls` the executions that it made, and their events.
"""

from __future__ import annotations

from ways_apart import APART
from ways_further import FURTHER

HEAD = '''\
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import concurrent.futures
import itertools
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

NAMES = globals().get("NAMES", "")  # stands before the names of all gates
calls, events, armed, interrupting = [], [], set(), set()
settling = []
SLOW = 8  # of so many functions one takes its time
armed_calls, LATER = [], 0  # of the armed functions; so many go well before one raises


class Planned(Exception):
  """An armed function raises it."""


def note(name, shape, *values):
  """Notes an event for each lane that the host's function gets at once."""
  values = [np.asarray(value) for value in values]
  rank = len(shape)
  whole = all(value.shape[value.ndim - rank :] == shape for value in values)  # and no shard
  for lane in np.ndindex(values[0].shape[: values[0].ndim - rank] if whole else 0):
    of_lane = [value[lane] for value in values]
    wide = [np.stack([x.real, x.imag]) if x.dtype.kind == "c" else x for x in of_lane]
    numbers = [number for x in wide for number in x.astype(np.float64).ravel().tolist()]
    events.append((name, tuple(numbers)))
  if sum(map(ord, name)) % SLOW == 0:
    time.sleep(0.002)
  if name in armed:
    armed_calls.append(name)
    if len(armed_calls) > LATER:
      raise Planned(name)
  if name in interrupting:
    interrupting.clear()
    os.kill(os.getpid(), signal.SIGINT)


def settled():
  cg.barrier()
  jax.effects_barrier()
  for bring in settling:  # events of other processes
    bring()


def execute(count, run):
  """Calls `run()` and notes the results of all its executions with their events."""
  begin = len(events)
  executions = [jax.block_until_ready(results) for results in run()]
  settled()
  assert len(executions) == count
  arrays = [[np.asarray(x) for x in results] for results in executions]
  calls.append((arrays, events[begin:]))

'''

_THREE = """
for _ in range(3):
  execute(1, lambda: [run(*inputs)])
"""

_AT_ONCE = """
found, failed = [None] * 6, []
def work(k):
  try:
    for i in range(3):
      found[3 * k + i] = jax.block_until_ready(run(*inputs))
  except BaseException as error:
    failed.append(error)
def all_of_them():
  threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
  for thread in threads: thread.start()
  for thread in threads: thread.join()
  for error in failed: raise error
  return found
execute(6, all_of_them)
"""
_THREADS = (
  """
execute(1, lambda: [run(*inputs)])
"""
  + _AT_ONCE
)

_EXPORTED = """
from jax import export
exported = export.export(jax.jit(program), disabled_checks=cg.export_checks())(*inputs)
run = jax.jit(export.deserialize(exported.serialize()).call)
"""

_ERROR = """
execute(1, lambda: [run(*inputs)])
raised = None
armed.add(ARMED)
try:
  with cg.errors():
    jax.block_until_ready(run(*inputs))
except Planned as error:
  raised = error
armed.clear()
settled()
assert (raised is not None) == (len(armed_calls) > LATER), (
  f"{ARMED} raised and {raised!r} came")
assert LATER or raised is not None or ARMED_RAN == 0, f"{ARMED} was to run"
execute(1, lambda: [run(*inputs)])
"""

# Several programs may fail, of which the later ones are under way when the first has been told of.
_ERROR_OUTSIDE = _ERROR.replace(
  "armed.clear()", "try:\n  cg.barrier()\nexcept Planned:\n  pass\narmed.clear()"
)
# Outside of `errors()` XLA's exception stands for it, or it comes from the barrier.
_ERROR_AT_A_BARRIER = """
execute(1, lambda: [run(*inputs)])
raised = []
armed.add(ARMED)
for wait in (lambda: jax.block_until_ready(run(*inputs)), cg.barrier):
  try:
    wait()
  except Exception as error:
    raised.append(error)
armed.clear()
settled()
assert bool(raised) == bool(armed_calls), f"{ARMED} raised and {raised!r} came"
execute(1, lambda: [run(*inputs)])
"""

_INTERRUPTED = """
execute(1, lambda: [run(*inputs)])
raised = None
interrupting.add(ARMED)
begin = len(events)
try:
  with cg.errors():
    jax.block_until_ready(run(*inputs))
except KeyboardInterrupt as error:
  raised = error
interrupting.clear()
settled()
assert (raised is not None) == any(name == ARMED for name, _ in events[begin:]), (
  f"{ARMED} interrupted and {raised!r} came")
execute(1, lambda: [run(*inputs)])
"""

_RECORDED = """
import tempfile
path = os.path.join(tempfile.mkdtemp(), "recording")
with cg.record(path):
  execute(1, lambda: [run(*inputs)])
live = calls[-1][0]
with cg.replay(path):
  ordered = calls[-1][1] or any(name.startswith("feed") for name in globals())
  for _ in range(1 if ordered else 2):  # calls of pure gates have an answer each time
    again = jax.block_until_ready(run(*inputs))
    settled()
for a, b in zip(live[0], again):
  np.testing.assert_array_equal(a, np.asarray(b))
execute(1, lambda: [run(*inputs)])
"""

# The program is a step of a saving loop of four. It stops after some, and a second run goes on.
_RESUMED = """
import tempfile
folder = tempfile.mkdtemp()
halted = []
def halt(i):
  if i == STOP_AT and not halted:
    halted.append(int(i))
    cg.stop()
halt = cg.gate(halt, effect="io", name=NAMES + "halt")
def part(*xs):
  saves = cg.Checkpoints(folder, every=2, resume=True)
  first = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(program, *xs))
  def step(state, i):
    results = program(*xs)
    halt(i)
    return (state[0] + 1, results), None
  return cg.scan(step, (0, first), jnp.arange(4), save=saves, stoppable=True)[0]
def whole():
  n, _ = jax.jit(part)(*inputs)
  settled()
  ahead = 'P' in globals()  # a device that is ahead decides what a look says
  assert n == STOP_AT + 1 or ahead and n > STOP_AT, n
  n, results = jax.jit(part)(*inputs)
  assert n == 4, n
  return [results] * 4
STOP_AT = len(str(inputs)) % 3
execute(4, whole)
"""

WAYS = {
  "jit": "run = jax.jit(program)" + _THREE,
  "without jit": "run = program" + _THREE,
  "disable_jit": """
with jax.disable_jit():
  execute(1, lambda: [program(*inputs)])
""",
  "ahead of time": "run = jax.jit(program).lower(*inputs).compile()" + _THREE,
  "two threads": "run = jax.jit(program)" + _THREADS,
  "two programs at once": """
two = [jax.jit(program), jax.jit(lambda *xs: program(*xs))]
run = lambda *xs: two[threading.current_thread().name == "second"](*xs)
"""
  + _AT_ONCE.replace("args=(k,)", "args=(k,), name=('first', 'second')[k]"),
  "threads in a hurry": """
import sys
sys.setswitchinterval(1e-6)
run = jax.jit(program)
"""
  + _THREADS
  + "sys.setswitchinterval(0.005)\n",
  "forty under way": """
run = jax.jit(program)
execute(40, lambda: [run(*inputs) for _ in range(40)])
""",
  "donated": """
run = jax.jit(program, donate_argnums=0, keep_unused=True)
for _ in range(3):
  execute(1, lambda: [run(*(jnp.array(x) for x in inputs))])
""",
  "exported": _EXPORTED + _THREE,
  "an error": "run = jax.jit(program)" + _ERROR,
  "an error later": "LATER = 2\nrun = jax.jit(program)" + _ERROR,
  "an error without jit": "run = program" + _ERROR_OUTSIDE,
  "an error at a barrier": "run = jax.jit(program)" + _ERROR_AT_A_BARRIER,
  "interrupted": "run = jax.jit(program)" + _INTERRUPTED,
  "recorded": "run = jax.jit(program)" + _RECORDED,
  "engine jax": """
with cg.config(engine="jax"):
  run = jax.jit(program)
  execute(1, lambda: [run(*inputs)])
  execute(1, lambda: [run(*inputs)])
""",
  "debug_nans": """
with jax.debug_nans(True):
  run = jax.jit(program)
  execute(1, lambda: [run(*inputs)])
  execute(1, lambda: [program(*inputs)])
""",
  "check_writes": """
with cg.config(check_writes=True):
  run = jax.jit(program)
  execute(1, lambda: [run(*inputs)])
  execute(1, lambda: [run(*inputs)])
""",
  "cg.install": """
cg.install()
try:
  run = jax.jit(program)
  execute(1, lambda: [run(*inputs)])
finally:
  cg.uninstall()
execute(1, lambda: [run(*inputs)])
""",
  "remat3": """
before = jax.config.jax_remat3
jax.config.update("jax_remat3", True)
try:
  run = jax.jit(program)
  execute(1, lambda: [run(*inputs)])
  execute(1, lambda: [run(*inputs)])
finally:
  jax.config.update("jax_remat3", before)
""",
  "tracer leaks": """
with jax.checking_leaks():
  execute(1, lambda: [jax.jit(program)(*inputs)])
""",
  "caches cleared": """
run = jax.jit(program)
for _ in range(2):
  execute(1, lambda: [run(*inputs)])
  jax.clear_caches()
execute(1, lambda: [jax.jit(lambda *xs: program(*xs))(*inputs)])
""",
  "replicated": """
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('d',))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
inputs = jax.device_put(inputs, everywhere)
run = jax.jit(program)
for _ in range(3):
  execute(1, lambda: [run(*inputs)])
""",
  "explicit mesh": """
mesh = jax.make_mesh((4,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(mesh):
  run = jax.jit(program)
  for _ in range(3):
    execute(1, lambda: [run(*inputs)])
""",
  "sharded": """
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('d',))
P = jax.sharding.PartitionSpec
apart = lambda x: P(*('d' if n % 4 == 0 and n else None for n in x.shape[:1]))
inputs = [jax.device_put(x, jax.sharding.NamedSharding(mesh, apart(x))) for x in inputs]
run = jax.jit(program)
for _ in range(3):
  execute(1, lambda: [run(*inputs)])
""",
  "uneven": """
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('d',))
P = jax.sharding.PartitionSpec
apart = lambda x: P(*('d' for n in x.shape[:1] if n))
split = lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, apart(x)))
run = jax.jit(lambda *xs: jax.tree.map(split, program(*map(split, xs))))
for _ in range(3):
  execute(1, lambda: [run(*inputs)])
""",
  "explicitly sharded": """
mesh = jax.make_mesh((4,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))
P = jax.sharding.PartitionSpec
apart = lambda x: P(*('d' if n % 4 == 0 and n else None for n in x.shape[:1]))
with jax.set_mesh(mesh):
  inputs = [jax.device_put(x, jax.sharding.NamedSharding(mesh, apart(x))) for x in inputs]
  run = jax.jit(program)
  for _ in range(3):
    execute(1, lambda: [run(*inputs)])
""",
  "partial shard_map around": """
mesh = jax.make_mesh((2, 2), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
P = jax.sharding.PartitionSpec
run = jax.jit(
  jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={'a'}, check_vma=False)
)
for _ in range(3):
  execute(1, lambda: [run(*inputs)])
""",
  "shard_map around": """
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('d',))
P = jax.sharding.PartitionSpec
run = jax.jit(
  jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
)
for _ in range(3):
  execute(4, lambda: [run(*inputs)] * 4)
""",
  "resumed": _RESUMED,
  "scan around": """
run = jax.jit(lambda *xs: jax.lax.scan(lambda _, i: (None, program(*xs)), None, jnp.arange(2)))
execute(2, lambda: [[x[i] for x in run(*inputs)[1]] for i in range(1)] * 2)
""",
  "grad around": """
f = lambda xs: (jnp.float32(0), program(*xs))
run = jax.jit(jax.value_and_grad(f, has_aux=True))
for _ in range(2):
  execute(1, lambda: [run(inputs)[0][1]])
""",
  "vmap around": """
run = jax.jit(jax.vmap(program))
execute(1, lambda: [[x[0] for x in run(*(jnp.stack([x]) for x in inputs))]])
""",
  **APART,
  **FURTHER,
}
# The twins of a way with a gate of its own, in JAX's own loop, and of ways that ask callgate.
TWINS = {"resumed": "scan around", "find_nan": "jit", "verified": "jit"}
NEEDS_ERRORS = ("an error", "an error later", "an error without jit", "interrupted")
NEEDS_ERRORS += ("an error at a barrier",)
# A stop reaches the programs that were dispatched before: there are several, or one for all calls.
NOT_STOPPED = (
  *("without jit", "disable_jit", "two threads", "forty under way", "an error", "interrupted"),
  *("an error without jit", "engine jax", "debug_nans", "recorded", "scan around", "exported"),
  *("two programs at once", "threads in a hurry", "an error later", "resumed"),
  *("exported to another process", "an error at a barrier", "verified", *FURTHER),
)
# Programs that save at once would share a folder, and so would lanes.
NOT_SAVED = (
  *("two threads", "forty under way", "scan around", "vmap around", "two programs at once"),
  *("threads in a hurry", "partial shard_map around", "shard_map around", "resumed"),
)
SPLIT = (
  "sharded",
  "uneven",
  "explicitly sharded",
  "partial shard_map around",
)  # XLA splits calls as it likes
AROUND = ("shard_map around", "partial shard_map around")  # no place for another, or empty arrays
OVER_DEVICES = ("replicated", "explicit mesh", "shard_map around", *SPLIT)
