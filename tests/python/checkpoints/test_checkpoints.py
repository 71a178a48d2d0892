# SPDX-License-Identifier: Apache-2.0
"""`callgate.Checkpoints`: what a loop leaves on the disk, and how it goes on from there."""

from __future__ import annotations

import io
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interpreters import output_of, start
from property_checks import is_soak

import callgate as cg
from callgate._checkpoints import files, parts
from callgate._core.public import core
from callgate._tap.channel import open_channels


def step(carry: Any, x: Any) -> Any:
  carry = {"n": carry["n"] + 1, "w": carry["w"] * 0.5 + x, "key": jax.random.split(carry["key"])[0]}
  return carry, carry["w"].sum()


def init() -> Any:
  return {"n": jnp.int32(0), "w": jnp.zeros(3), "key": jax.random.key(1)}


XS = jnp.arange(1.0, 11.0)


def run(saves: Any, xs: Any = XS, **options: Any) -> Any:
  result = jax.jit(lambda carry, xs: cg.scan(step, carry, xs, save=saves, **options))(init(), xs)
  cg.barrier()
  return result


def assert_same(a: Any, b: Any) -> None:
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(x, y)


def test_a_stream_beside_the_writer_gets_changes_of_knobs(tmp_path: Path) -> None:
  saves, knob = cg.Checkpoints(tmp_path / "saves", every=5), cg.knob("checkpoints.rate", 0.5)
  program = jax.jit(lambda carry, xs: cg.scan(step, carry, xs, save=saves))
  jax.block_until_ready(program(init(), XS))
  cg.barrier()
  (opened,) = [one for one in open_channels().values() if str(saves.folder) in one.name]
  opened.add(cg.sinks.Stream(tmp_path / "s.cgs"))
  knob.set(0.25)
  jax.block_until_ready(program(init(), XS))
  cg.barrier()
  opened.flush()
  names = [record.name for record in cg.open_stream(tmp_path / "s.cgs")]
  assert names.count("knob:checkpoints.rate") == 1
  assert names.count("checkpoint") == 2
  assert saves.steps() == (5, 10)


def test_the_loop_is_jaxs(engine: str, tmp_path: Path) -> None:
  want = jax.lax.scan(step, init(), XS)
  saves = cg.Checkpoints(tmp_path, every=4, keep=5)
  assert_same(run(saves), want)
  assert saves.steps() == (4, 8, 10)
  assert_same(saves.load(init()), jax.tree.map(_bits, want[0]))
  assert saves.load(init(), step=4)["n"] == 4
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "step_0000000004", "step_0000000008", "step_0000000010",
  ]  # fmt: skip


def _bits(x: Any) -> Any:
  return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("reverse", [False, True])
def test_another_run_goes_on(engine: str, tmp_path: Path, reverse: bool) -> None:
  carry, ys = jax.lax.scan(step, init(), XS, reverse=reverse)
  first = XS[5:] if reverse else XS[:5]
  run(cg.Checkpoints(tmp_path, every=5), first, reverse=reverse)
  saves, file = cg.Checkpoints(tmp_path, every=5, resume=True), io.StringIO()
  got, rest = run(saves, reverse=reverse, progress=cg.Progress("on", file=file))
  assert_same(got, carry)
  cg.barrier()
  assert file.getvalue().startswith("on: 100% 5/5 [")  # the steps that were left
  skipped = np.arange(10) >= 5 if reverse else np.arange(10) < 5
  np.testing.assert_array_equal(rest, np.where(skipped, 0, ys))


def test_resuming_with_nothing_there_starts_at_the_beginning(engine: str, tmp_path: Path) -> None:
  saves = cg.Checkpoints(tmp_path / "new", every=3, keep=2, resume=True)
  program = jax.jit(lambda carry: cg.scan(step, carry, XS, save=saves))
  assert_same(program(init()), jax.lax.scan(step, init(), XS))
  cg.barrier()
  assert saves.steps() == (9, 10)
  carry, ys = program(init())  # the same program, compiled once: it asks the disk
  assert carry["n"] == 10
  assert not ys.any()


def test_a_run_that_is_stopped_leaves_what_it_reached(tmp_path: Path) -> None:
  def watched(carry: Any, x: Any) -> Any:
    cg.tap(carry["n"], lambda n: cg.stop("now") if n == 5 else None)
    return step(carry, x)

  xs = jnp.ones(100_000)
  saves = cg.Checkpoints(tmp_path, every=50_000)
  program = lambda saves: jax.jit(
    lambda carry: cg.scan(watched, carry, xs, save=saves, stoppable=True)
  )
  carry, ys, steps = program(saves)(init())
  cg.barrier()
  reached = int(steps)
  assert 5 < reached < 100_000
  assert saves.steps()[-1] == reached == carry["n"]
  cg.stop("again")
  carry, ys, steps = program(cg.Checkpoints(tmp_path, every=50_000, resume=True))(init())
  assert int(steps) == carry["n"] == 100_000
  assert not ys[:reached].any()
  assert ys[reached:].all()


def test_a_second_run_begins_anew(tmp_path: Path) -> None:
  saves = cg.Checkpoints(tmp_path, every=4, keep=2)
  program = jax.jit(lambda carry: cg.scan(step, carry, XS, save=saves))
  for _ in range(2):
    program(init())
    cg.barrier()
    assert saves.steps() == (8, 10)
  with pytest.raises(FileExistsError, match="expected an empty folder without"), cg.errors():
    jax.block_until_ready(run(cg.Checkpoints(tmp_path)))
  assert saves.steps() == (8, 10)


def test_runs_that_follow_each_other_at_once(tmp_path: Path) -> None:
  saves = cg.Checkpoints(tmp_path, every=1, keep=3)
  program = jax.jit(lambda carry: cg.scan(step, carry, XS, save=saves))
  for _ in range(20):  # each begins while the ones before it are being written
    program(init())
  cg.barrier()
  assert saves.steps() == (8, 9, 10)
  assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("each", [False, True])
def test_the_next_call_goes_on_from_what_the_last_one_sent(
  engine: str, tmp_path: Path, each: bool
) -> None:
  def program(saves: Any) -> Any:
    return jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=4, save=saves)[0])

  makers = [cg.Checkpoints(tmp_path, every=2, resume=True) for _ in range(3)]
  programs = [program(saves).lower(0.0).compile() for saves in makers]
  called = programs if each else programs[:1] * 3
  assert [float(one(10.0 * i)) for i, one in enumerate(called)] == [4, 4, 4]


def test_a_block_ends_when_all_is_on_the_disk(tmp_path: Path) -> None:
  with cg.Checkpoints(tmp_path, every=2) as saves:
    jax.jit(lambda carry: cg.scan(step, carry, XS, save=saves))(init())
  assert saves.steps() == (6, 8, 10)


def test_types_of_all_kinds_come_back(tmp_path: Path) -> None:
  state = {
    "bf16": jnp.ones((2, 2), jnp.bfloat16),
    "f8": jnp.ones(3, jnp.float8_e4m3fn),
    "i4": jnp.arange(4, dtype=jnp.int4),
    "c": jnp.ones((), jnp.complex64),
    "b": jnp.array([True, False]),
    "empty": jnp.zeros((0, 3)),
  }
  grow = lambda c, _: ({**c, "c": c["c"] * 2}, None)
  program = lambda saves: jax.jit(lambda c: cg.scan(grow, c, length=4, save=saves)[0])(state)
  first = program(cg.Checkpoints(tmp_path, every=2))
  cg.barrier()
  again = program(cg.Checkpoints(tmp_path, resume=True))
  assert_same(first, again)
  assert again["bf16"].dtype == ml_dtypes.bfloat16
  assert again["c"] == 16


def test_another_carry_is_refused(tmp_path: Path) -> None:
  run(cg.Checkpoints(tmp_path))
  other = lambda saves, carry: jax.jit(
    lambda c: cg.scan(lambda c, x: (c, None), c, length=20, save=saves)
  )(carry)
  for carry, message in (
    (
      {**init(), "w": jnp.zeros(4)},
      r"with \['w'\]: float32\[4\], got one with \['w'\]: float32\[3\]; use another folder, or the",
    ),
    (jnp.zeros(3), "of this carry, with 1 arrays, got one with 3; use another folder, or the prog"),
  ):
    with pytest.raises(ValueError, match=message), cg.errors():
      jax.block_until_ready(other(cg.Checkpoints(tmp_path, resume=True), carry))
    with pytest.raises(ValueError, match=message):
      cg.Checkpoints(tmp_path).load(carry)
  with pytest.raises(
    FileNotFoundError, match=r"expected a checkpoint of step 3, got steps \(10,\)"
  ):
    cg.Checkpoints(tmp_path).load(init(), step=3)


def test_a_damaged_one_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  run(cg.Checkpoints(tmp_path, every=6))
  part = next(tmp_path.glob("step_0000000010/part_*.npz"))
  data = bytearray(part.read_bytes())
  data[len(data) // 3] ^= 0xFF
  part.write_bytes(data)
  with pytest.raises(ValueError, match="expected an intact file, got a damaged one"):
    cg.Checkpoints(tmp_path).load(init())
  carry, ys = run(cg.Checkpoints(tmp_path, resume=True))
  assert_same(carry, jax.lax.scan(step, init(), XS)[0])
  np.testing.assert_array_equal(ys != 0, np.arange(10) >= 6)
  assert "step_0000000010 is damaged" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["meta.json", "part_*.json"])
def test_one_bit_of_what_describes_it_is_seen(
  tmp_path: Path, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
  def count(c: Any, _: Any) -> Any:
    return c + 1, None

  def loop(length: int, saves: Any) -> int:
    got = jax.jit(lambda c: cg.scan(count, c, length=length, save=saves)[0])(0)
    cg.barrier()
    return int(got)

  assert loop(35, cg.Checkpoints(tmp_path, every=10)) == 35
  path = next(tmp_path.glob(f"step_0000000035/{file}"))
  whole, rng = path.read_bytes(), np.random.default_rng(0)
  before = cg.Checkpoints(tmp_path, resume=True)
  for bit in rng.choice(8 * len(whole), 20, replace=False):
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)  # where only the spelling changed it is the same
    assert core(before)._loader._find(100)[0] in (
      30,
      35,
    )
  path.write_bytes(whole.replace(b"35", b"75"))
  assert loop(100, cg.Checkpoints(tmp_path, resume=True)) == 100
  assert file != "meta.json" or "step_0000000035 is damaged" in capfd.readouterr().err


def test_a_shorter_loop_is_refused(tmp_path: Path) -> None:
  run(cg.Checkpoints(tmp_path, every=5))
  said = "at least 10 steps to resume, got one of 4; pass the number of steps from the loop's begin"
  with pytest.raises(ValueError, match=said), cg.errors():
    jax.block_until_ready(run(cg.Checkpoints(tmp_path, resume=True), XS[:4]))


def test_a_carry_of_pythons_numbers_and_of_narrow_integers(engine: str, tmp_path: Path) -> None:
  def loop(carry: Any, folder: Path) -> Any:
    saves = cg.Checkpoints(folder, resume=True)
    got = jax.jit(lambda xs: cg.scan(lambda c, x: (c, x), carry, xs, save=saves)[0])(XS)
    cg.barrier()
    return got, saves.load(carry)

  got, saved = loop(0.5, tmp_path / "a")
  assert got == saved == 0.5
  narrow = jnp.arange(4, dtype=jnp.int4)
  got, saved = loop(narrow, tmp_path / "b")
  assert got.dtype == saved.dtype == jnp.int4
  np.testing.assert_array_equal(saved.astype(int), [0, 1, 2, 3])


def test_a_failed_write_is_the_barriers_error(tmp_path: Path) -> None:
  saves = cg.Checkpoints(tmp_path / "here", every=5)
  carry, _ = jax.jit(lambda c: cg.scan(step, c, XS[:4], save=saves))(init())
  cg.barrier()
  (tmp_path / "here").rename(tmp_path / "gone")
  (tmp_path / "here").write_text("a file")
  program = jax.jit(lambda c: core(saves).send(jnp.int32(1), jnp.int32(12345), c, {}, True))
  program(carry)
  with pytest.raises(OSError, match="here"):
    cg.barrier()


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parts_of_devices_and_another_number_of_them(tmp_path: Path, devices: int) -> None:
  def sharded(count: int) -> Any:
    mesh = jax.make_mesh((count,), ("d",), devices=jax.devices()[:count])
    place = lambda spec: jax.NamedSharding(mesh, spec)
    return {
      "w": jax.device_put(jnp.arange(16.0).reshape(8, 2), place(jax.P("d"))),
      "v": jax.device_put(jnp.arange(8.0), place(jax.P())),
    }

  body = lambda c, _: ({"w": c["w"] + 1, "v": c["v"] * 2}, c["w"].sum())
  program = lambda saves, c, n: jax.jit(lambda c: cg.scan(body, c, length=n, save=saves))(c)
  program(cg.Checkpoints(tmp_path, every=2), sharded(4), 4)
  cg.barrier()
  assert len(list(tmp_path.glob("step_0000000004/part_*.npz"))) == 4
  carry, ys = program(cg.Checkpoints(tmp_path, resume=True), sharded(devices), 6)
  np.testing.assert_array_equal(carry["w"], np.arange(16.0).reshape(8, 2) + 6)
  np.testing.assert_array_equal(carry["v"], np.arange(8.0) * 64)
  assert not ys[:4].any()
  assert ys[4:].all()


def test_derivatives_without_resume(tmp_path: Path) -> None:
  def loss(x: Any, **options: Any) -> Any:
    body = lambda c, t: (jnp.sin(c) * t, c)
    return cg.scan(body, x, jnp.arange(1.0, 4.0), **options)[0]

  saves = cg.Checkpoints(tmp_path, every=2)
  with_saves = jax.jit(jax.value_and_grad(lambda x: loss(x, save=saves)))
  np.testing.assert_allclose(with_saves(0.3), jax.value_and_grad(loss)(0.3), rtol=1e-6)
  cg.barrier()
  assert saves.steps() == (2, 3)
  np.testing.assert_allclose(
    jax.jit(jax.jacfwd(lambda x: loss(x, save=saves)))(0.3), jax.jacfwd(loss)(0.3), rtol=1e-6
  )


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("until", [None, lambda c: c < 0])
def test_a_resumed_loop_refuses_reverse_mode_by_name(
  tmp_path: Path, jitted: bool, until: Any
) -> None:
  saves = cg.Checkpoints(tmp_path, every=2, resume=True)
  run = lambda x, w: cg.scan(
    lambda c, _: (jnp.sin(w * c), None), x, length=6, save=saves, until=until
  )[0]
  for transform in (jax.grad, jax.jacrev):
    derivative = transform(run, 1)
    with pytest.raises(cg.GateDefinitionError) as raised:
      (jax.jit(derivative) if jitted else derivative)(0.3, 2.0)
    said = str(raised.value)
    assert f"save=Checkpoints('{tmp_path}', resume=True): expected no reverse-mode" in said
    assert "got one of the loop at " in said
    assert "test_checkpoints.py:" in said
    assert "forward mode" in said
  assert np.isfinite(jax.jvp(lambda w: run(0.3, w), (2.0,), (1.0,))[1])
  loss = lambda w: (jax.lax.stop_gradient(run(0.3, w)) * w).sum()
  assert np.isfinite(jax.grad(loss)(2.0))


@pytest.mark.parametrize("resume", [False, True])
def test_lanes_and_regions_are_refused_by_name(tmp_path: Path, resume: bool) -> None:
  saves = cg.Checkpoints(tmp_path, resume=resume)
  loop = lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=3, save=saves)[0]
  with pytest.raises(cg.GateDefinitionError, match=r"expected a scan outside jax\.vmap"):
    jax.vmap(loop)(jnp.zeros(3))
  mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
  x = jax.device_put(jnp.zeros(2), jax.NamedSharding(mesh, jax.P("d")))
  with pytest.raises(cg.GateDefinitionError, match=r"outside jax\.shard_map"):
    jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))(x)


@pytest.mark.parametrize("resume", [False, True])
def test_a_feed_whose_items_several_devices_take_is_refused(tmp_path: Path, resume: bool) -> None:
  def run(devices: int, **options: Any) -> Any:
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("d",))
    numbers = cg.feed((np.float32(i) for i in itertools.count()), **options)
    add = jax.shard_map(
      lambda x: x + numbers.next(), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")
    )
    saves = cg.Checkpoints(tmp_path / f"{devices}", resume=resume)
    return cg.scan(lambda x, _: (add(x), None), jnp.zeros(2), length=4, save=saves)[0].sum()

  with pytest.raises(cg.GateDefinitionError, match=r"next\(\) outside of the jax.shard_map"):
    run(2)
  assert run(1) == 2 * sum(range(4))
  assert run(2, resumable=False) == sum(range(8))


def test_wrong_options(tmp_path: Path) -> None:
  for options, message in (
    ({"every": 0}, "Checkpoints: every: expected"),
    ({"keep": 0}, "Checkpoints: keep: expected"),
    ({"resume": 1}, "Checkpoints: resume: expected"),
  ):
    with pytest.raises(cg.GateDefinitionError, match=message):
      cg.Checkpoints(tmp_path, **options)
  with pytest.raises(cg.GateDefinitionError, match=r"scan: save: expected callgate\.Checkpoints"):
    cg.scan(step, init(), XS, save="folder")


LOOP = """
import os, sys, threading, time
import jax, jax.numpy as jnp
import callgate as cg

def body(carry, _):
  n, w = carry
  return (n + 1, w + n), None

saves = cg.Checkpoints(sys.argv[1], every=1, keep=2, resume=True)
program = jax.jit(lambda c: cg.scan(body, c, length=10_000_000, save=saves))
program((jnp.int32(0), jnp.zeros(1000)))
"""


def test_kill_at_any_moment_leaves_whole_ones(tmp_path: Path) -> None:
  """A run that is killed while it writes goes on where it was."""
  reached = 0
  for kills in range(2):
    process = start(LOOP, str(tmp_path))
    wanted = reached + 1 + kills
    while max(cg.Checkpoints(tmp_path).steps(), default=0) < wanted and process.poll() is None:
      pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(60)
    reached = assert_whole(tmp_path)
    assert reached >= wanted


def assert_whole(folder: Path) -> int:
  saves = cg.Checkpoints(folder)
  for number in saves.steps():
    n, w = saves.load((np.int32(0), np.zeros(1000, np.float32)), number)
    assert n == number
    np.testing.assert_array_equal(w, np.full(1000, number * (number - 1) / 2, np.float32))
  return saves.steps()[-1] if saves.steps() else 0


LEAVES = (parts.Leaf("[0]", (), "int32"), files.Leaf("[1]", (1000,), "float32"))


def write(folder: Path, number: int) -> None:
  w = np.full(1000, number * (number - 1) / 2, np.float32)
  parts = {0: ((), np.int32(number)), 1: ((slice(0, 1000),), w)}
  files.write(folder, number, 1, "part_00000_00000", parts)
  files.finish(folder, number, 1, LEAVES)
  files.keep_newest(folder, 2)


def assert_nothing_else_is_left(folder: Path, newest: int) -> None:
  names = sorted(path.name for path in folder.iterdir())
  assert names == [f"step_{number:010d}" for number in (newest - 1, newest)]


class Killed(BaseException):
  pass


def test_an_end_at_each_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Ends the writer at its first change of the disk, its second one, and so on."""
  left = 0

  def counted(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
      nonlocal left
      if left == 0:
        raise Killed
      left -= 1
      return function(*args, **kwargs)

    return call

  for owner, name in (
    (os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open"), (np, "savez"),
    (files.shutil, "rmtree"),
  ):  # fmt: skip
    monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
  reached = 0
  for moment in range(200 if is_soak() else 75):
    left = moment % 25
    try:
      while True:
        write(tmp_path, reached + 1)
        reached += 1
    except Killed:
      pass
    left = 1_000_000
    files.clean(tmp_path)  # as a run does that begins
    now = assert_whole(tmp_path)
    assert now in (reached, reached + 1)  # it may have got its name before the end
    reached = now
  write(tmp_path, reached + 1)
  assert_nothing_else_is_left(tmp_path, reached + 1)


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_kill_while_writing(tmp_path: Path) -> None:
  newest = lambda: max(cg.Checkpoints(tmp_path).steps(), default=0)
  reached = 0
  for turn, moment in enumerate(np.random.default_rng(0).uniform(0, 0.01, 20 if is_soak() else 8)):
    child = os.fork()
    if child == 0:  # writes until it is killed; neither JAX nor callgate's threads are needed
      for number in range(reached + 1, reached + 1000):
        write(tmp_path, number)
      os._exit(1)
    time.sleep(moment)
    while turn % 4 == 0 and newest() == reached:
      time.sleep(0.001)  # some get on in any case
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    files.clean(tmp_path)
    now = assert_whole(tmp_path)
    assert now >= reached
    reached = now
  write(tmp_path, reached + 1)
  assert_nothing_else_is_left(tmp_path, reached + 1)


# -- the ends of blocks, programs and processes ----------------------------------------------------
def test_a_leaf_of_float0_is_saved(tmp_path: Path) -> None:
  first = np.float32(0), np.zeros(2, jax.dtypes.float0)
  for length in (3, 5):
    saves = cg.Checkpoints(tmp_path, every=2, resume=True)
    body = lambda c, _: ((c[0] + 1, c[1]), None)
    carry = jax.jit(lambda s=saves, n=length: cg.scan(body, first, length=n, save=s)[0])()
    cg.barrier()
    assert carry[0] == length


def test_the_end_of_a_process_waits_for_a_slow_disk(tmp_path: Path) -> None:
  program = """
    import os, sys, time
    os.environ["CALLGATE_EXIT_SECONDS"] = "0.2"
    sys.stderr = sys.stdout
    import jax, callgate as cg
    from callgate._checkpoints import files, parts
    write = files.write
    files.write = lambda *args: (time.sleep(0.3), write(*args))[1]
    def run():  # drops its Checkpoints, and the program
      saves = cg.Checkpoints(FOLDER, every=1, keep=9)
      jax.jit(lambda x: cg.scan(lambda x, _: (x + 1, None), x, length=5, save=saves)[0])(0)
    run()
  """
  printed = output_of(program.replace("FOLDER", repr(str(tmp_path))))
  assert cg.Checkpoints(tmp_path).steps() == (1, 2, 3, 4, 5)
  assert printed.count("the end of the program waits until they are written") == 1
  assert "not delivered" not in printed


def test_a_run_that_begins_while_another_one_cleans_keeps_its_folder(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  folder, glob = files._unfinished(tmp_path, 1, 2**31), Path.glob

  def begin_meanwhile(path: Path, pattern: str) -> Any:
    if pattern == ".step_*":
      files.take_part(2**31)
      folder.mkdir(parents=True)
    return glob(path, pattern)

  monkeypatch.setattr(Path, "glob", begin_meanwhile)
  files.clean(tmp_path)
  assert folder.exists()
