# SPDX-License-Identifier: Apache-2.0
"""`callgate.install()` and `uninstall()`: when they count, for whom, and what they leave behind."""

from __future__ import annotations

import gc
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of, printed_by
from jax.experimental import io_callback

import callgate as cg
from callgate._runtime.config import installed


@pytest.fixture(autouse=True)
def leave_jax_as_it_was() -> Iterator[None]:
  yield
  jax.effects_barrier()
  cg.uninstall()


SCALAR = jax.ShapeDtypeStruct((), np.float32)


def square(x: Any) -> Any:
  return jax.pure_callback(np.square, SCALAR, x)


def engine_of(f: Any, *args: Any) -> str:
  text = jax.jit(f).lower(*args).as_text()
  assert ("callgate.gate" in text) != ("xla_ffi_python_cpu_callback" in text)
  return "callgate" if "callgate.gate" in text else "jax"


def test_importing_callgate_changes_nothing() -> None:
  assert not installed()
  assert engine_of(square, 1.0) == "jax"


def test_install_and_uninstall_switch_the_engine_and_may_be_repeated() -> None:
  for _ in range(2):
    cg.install()
    cg.install()
    assert installed()
    assert engine_of(square, 1.0) == "callgate"
    assert engine_of(lambda x: io_callback(np.square, SCALAR, x), 1.0) == "callgate"
    cg.uninstall()
    cg.uninstall()
    assert not installed()
    assert engine_of(square, 1.0) == "jax"


def test_functions_that_were_jitted_before_change_engine_too() -> None:
  names: list[str] = []

  def callback(x: Any) -> Any:
    names.extend(frame for frame in ["callgate"] if called_by_callgate())
    return x

  def called_by_callgate() -> bool:
    frame = sys._getframe()
    while frame is not None:
      if "callgate/compat" in frame.f_code.co_filename:
        return True
      frame = frame.f_back
    return False

  f = jax.jit(lambda x: jax.pure_callback(callback, SCALAR, x))
  assert f(1.0) == 1
  assert names == []
  cg.install()
  assert f(1.0) == 1
  assert names == ["callgate"]
  eager = jax.pure_callback(callback, SCALAR, 1.0)
  assert eager == 1
  assert names == ["callgate"] * 2
  cg.uninstall()
  assert f(1.0) == 1
  assert names == ["callgate"] * 2


def test_compiled_objects_go_on_working_after_a_switch() -> None:
  cg.install()
  compiled = jax.jit(square).lower(1.0).compile()
  cg.uninstall()
  gc.collect()
  assert compiled(3.0) == 9
  del compiled


def test_the_callback_lives_as_long_as_a_program_and_no_longer() -> None:
  cg.install()

  class Callback:
    def __call__(self, x: Any) -> Any:
      return x

  def program(callback: Callback) -> Any:
    return jax.jit(lambda x: jax.pure_callback(callback, SCALAR, x)).lower(1.0).compile()

  callback = Callback()
  alive = weakref.ref(callback)
  compiled = program(callback)
  del callback
  jax.clear_caches()
  gc.collect()
  assert alive() is not None
  assert compiled(2.0) == 2
  del compiled
  jax.clear_caches()
  gc.collect()
  assert alive() is None


def test_programs_that_are_dropped_leave_no_names_behind() -> None:
  cg.install()
  from callgate import _callgate

  def run(i: int) -> None:
    assert jax.pure_callback(lambda x: x + i, SCALAR, 1.0) == 1 + i

  run(0)
  jax.clear_caches()
  gc.collect()
  before = len(_callgate.registered_names())
  for i in range(5):
    run(i)
  jax.clear_caches()
  gc.collect()
  assert len(_callgate.registered_names()) <= before


def test_switching_from_many_threads_ends_in_a_consistent_state() -> None:
  f = jax.jit(square)
  errors: list[BaseException] = []

  def work(on: bool) -> None:
    try:
      for _ in range(5):
        (cg.install if on else cg.uninstall)()
        assert f(3.0) == 9
    except Exception as error:  # noqa: BLE001 - a thread's own would be lost
      errors.append(error)

  threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert errors == []
  cg.install()
  # A new function: `square` may have been compiled by one thread while another switched.
  assert engine_of(lambda x: square(x), 1.0) == "callgate"


def test_jax_export_refuses_callbacks_as_it_does_without_callgate() -> None:
  def refusal() -> str:
    with pytest.raises((NotImplementedError, ValueError)) as info:
      jax.export.export(jax.jit(square))(SCALAR)
    return type(info.value).__name__

  expected = refusal()
  cg.install()
  assert refusal() == expected


SHARDED = """
  import collections
  import jax, jax.numpy as jnp, numpy as np
  import callgate as cg
  from jax.experimental import io_callback
  from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
  assert len(jax.devices()) == 2
  mesh = Mesh(np.array(jax.devices()), ("x",))
  sharded = NamedSharding(mesh, P("x"))
  x = jax.device_put(jnp.arange(8.0), sharded)
  like = jax.ShapeDtypeStruct

  def results():
    calls = collections.defaultdict(list)
    def note(name):
      def callback(x):
        calls[name].append(np.asarray(x).tolist())
        return x * 2
      return callback
    out = []
    for k, device in enumerate([None, jax.devices()[1]]):
      sharding = None if device is None else SingleDeviceSharding(device)
      call = note(f"auto{k}")
      f = lambda x: jax.pure_callback(call, like(x.shape, x.dtype), x, sharding=sharding)
      f = jax.jit(f, in_shardings=sharded, out_shardings=sharded)
      text = f.lower(x).as_text()
      assert f"maximal_mesh_{k}" in text or f"maximal device={k}" in text, text
      out.append(np.asarray(f(x)))
    manual = jax.shard_map(
      lambda x: jax.pure_callback(note("manual"), like(x.shape, x.dtype), x),
      mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    out.append(np.asarray(jax.jit(manual)(x)))
    def ordered(x):
      io_callback(note("one"), like((8,), x.dtype), x, ordered=True)
      return io_callback(note("one"), like((8,), x.dtype), x + 1, ordered=True)
    out.append(np.asarray(jax.jit(ordered, in_shardings=sharded)(x)))
    def none(x):
      note("none")(x)
    jax.jit(lambda x: io_callback(none, None, x), in_shardings=sharded)(x)
    jax.effects_barrier()
    per_device = lambda x: jax.pure_callback(note("pmap"), like((4,), x.dtype), x)
    out.append(np.asarray(jax.pmap(per_device)(x.reshape(2, 4))))
    return [o.tolist() for o in out], {k: sorted(v) for k, v in calls.items()}

  def refusal():
    try:
      f = lambda x: jax.pure_callback(np.sin, like(x.shape, x.dtype), x, sharding=sharded)
      jax.jit(f, in_shardings=sharded).lower(x)
    except NotImplementedError as error:
      return str(error)

  expected, refused = results(), refusal()
  cg.install()
  assert results() == expected, (results(), expected)
  assert refusal() == refused and refused
  print("same")
"""


NESTED = textwrap.dedent("""
  import time
  from concurrent.futures import ThreadPoolExecutor
  import jax, jax.numpy as jnp, numpy as np
  import callgate as cg
  from jax.experimental import io_callback
  THREADS = 4
  number = jax.ShapeDtypeStruct((), np.int32)
  ended, square = [], np.eye(300, dtype=np.float32)  # a product that XLA would not run at once

  def end(i):  # XLA promises no two of them a thread, so they can't wait for each other
    time.sleep(0.05)  # longer than a dispatch
    ended.append(int(i))
    return np.int32(i)

  def inner(i, x):
    return io_callback(end, number, i), jnp.sin(x @ x)

  def run_each(i):
    ended.clear()
    with ThreadPoolExecutor(THREADS) as pool:  # nobody looks at what the programs give
      list(pool.map(lambda k: made(np.int32(k), square), range(THREADS)))
    return np.int32(len(ended))

  made = lambda *args: jax.jit(inner).lower(*args).compile()(*args)
  outer = lambda: int(jax.jit(lambda: io_callback(run_each, number, np.int32(0)))())
  cg.install()
  print(*(outer() for _ in range(5)))
""")


DISPATCHED = textwrap.dedent("""
  import time
  import jax, jax.numpy as jnp, numpy as np
  import callgate as cg
  from jax.experimental import io_callback

  seen, square = [], np.eye(300, dtype=np.float32)  # a product that XLA would not run at once

  def late(x):
    time.sleep(0.05)
    seen.append(float(x))
    return np.float32(x)

  def calls(x):
    return io_callback(late, jax.ShapeDtypeStruct((), np.float32), x) + jnp.sum(square @ square)

  programs = {
    "jit": jax.jit(calls),
    "compiled": jax.jit(calls).lower(np.float32(0)).compile(),
    "loop": jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda i, y: calls(y), x)),
    "devices": lambda x: jax.pmap(calls)(jnp.stack([x] * jax.local_device_count())),
  }

  def counts():
    found = {}
    for name, program in programs.items():
      for call in range(3):
        seen.clear()
        result = program(np.float32(call))
        found[name, call] = len(seen)
        jax.block_until_ready(result)
    return found

  want = counts()
  cg.install()
  jax.clear_caches()
  programs["compiled"] = jax.jit(calls).lower(np.float32(0)).compile()
  assert counts() == want, (counts(), want)
  print(sorted(set(want.values())))
""")


def test_programs_with_io_callbacks_have_ended_when_their_dispatch_returns_as_in_jax() -> None:
  counts, nested = output_of(DISPATCHED + NESTED).splitlines()
  assert counts == "[1, 2]"
  assert nested.split() == ["4"] * 5  # so have those that callbacks run on threads


ROUNDS = textwrap.dedent("""
  import os, sys
  import jax, numpy as np
  import callgate as cg
  from jax.experimental import io_callback
  jax.config.update("jax_compilation_cache_dir", sys.argv[1])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  hits = []
  jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None
  )
  cg.install()
  like = jax.ShapeDtypeStruct((3,), np.float32)
  seen = []

  def programs(factor):  # the same text each time, and a callback of its own
    times = lambda x: np.asarray(x) * np.float32(factor)
    def pure(x): return jax.pure_callback(times, like, x)
    def io(x): return io_callback(times, like, x)
    def debug(x): jax.debug.callback(lambda v: seen.append(times(v)[1].item()), x); return x
    def both(x): return pure(pure(x)) + io(x)
    return pure, io, debug, both

  for factor in range(1, 4):
    before, results = len(hits), []
    for f in programs(factor):
      results.append(jax.jit(f)(np.arange(3, dtype=np.float32)).tolist()[1])
    jax.effects_barrier()
    print(factor, len(hits) - before, *results, seen[-1])
    jax.clear_caches()
  print(len([name for name in os.listdir(sys.argv[1]) if name.endswith("-cache")]))
  for _ in sys.argv[2:]:
    jax.pure_callback(lambda x: x, like, np.zeros(3, np.float32))
  print(jax.jit(programs(7)[0])(np.arange(3, dtype=np.float32)).tolist()[1])
""")


def test_a_program_that_is_lowered_anew_is_found_in_the_persistent_cache(tmp_path: Path) -> None:
  others = (), ("another", "and another")
  first, second = (printed_by(ROUNDS, str(tmp_path), *more).splitlines() for more in others)
  results = [f"{k}.0 {k}.0 1.0 {k * k + k}.0 {k}.0" for k in (1, 2, 3)]
  assert first[:3] == [f"{k} {4 * (k > 1)} {r}" for k, r in zip((1, 2, 3), results, strict=True)]
  assert second[:3] == [f"{k} 4 {r}" for k, r in zip((1, 2, 3), results, strict=True)]
  assert first[3] == second[3] == "4"
  assert first[4] == second[4] == "7.0"  # after other callbacks


def test_sharded_programs_call_on_the_devices_that_jax_calls_on() -> None:
  assert output_of(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2") == "same\n"


def test_a_large_program_with_callbacks_finishes_when_dispatched_asynchronously() -> None:
  cg.install()

  @jax.jit
  def f(x: Any) -> Any:
    for _ in range(5):
      x = jnp.tanh(x @ x)
      x = jax.pure_callback(lambda x: x * 0.5, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return x

  outs = [f(jnp.full((200, 200), i / 10, jnp.float32)) for i in range(10)]
  assert all(np.isfinite(np.asarray(out)).all() for out in outs)
