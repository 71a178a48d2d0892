# SPDX-License-Identifier: Apache-2.0
"""`callgate.breakpoint`: where a program stops, what its user sees there, how it goes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import interpreters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from transformation_table import assert_chains_agree, diagonal, reference
from waiting import until

import callgate as cg
from callgate.__main__ import main
from callgate._breakpoint import attach

FILE = __file__


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
  """The names at each stop; what `stops.edit` holds is done there."""
  seen = Stops()

  def hook() -> None:
    frame = sys._getframe(1)
    seen.frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    seen.append({k: v for k, v in frame.f_locals.items() if not k.startswith("__")})
    seen.outer.append(_functions(frame))
    for edit in seen.edits[len(seen) - 1 : len(seen)] or seen.edits[-1:]:
      edit(frame.f_locals)

  monkeypatch.setattr(sys, "breakpointhook", hook)
  return seen


class Stops(list[dict[str, Any]]):
  def __init__(self) -> None:
    super().__init__()
    self.frames: list[tuple[str, int, str]] = []
    self.outer: list[list[str]] = []
    self.edits: list[Callable[[dict[str, Any]], object]] = []


def _functions(frame: FrameType | None) -> list[str]:
  names: list[str] = []
  while frame is not None:
    if frame.f_code.co_filename == FILE:
      names.append(frame.f_code.co_name)
    frame = frame.f_back
  return names


@jax.jit
def root(x: Any) -> Any:
  y = jnp.sqrt(x)
  cg.breakpoint(jnp.isnan(y), x=x, why={"y": y})  # where it stops
  return y


WHERE = Path(FILE).read_text(encoding="utf-8").split("# where it stops")[0].count("\n") + 1


def test_nobody_stops_where_the_condition_is_false(engine: str, stops: Stops) -> None:
  assert root(4.0) == 2.0
  jax.block_until_ready(root(0.0))
  assert not stops


def test_a_stop_has_the_line_the_values_and_the_stack(engine: str, stops: Stops) -> None:
  def outer(x: Any) -> Any:
    return root.__wrapped__(x)

  assert np.isnan(jax.jit(outer)(-1.0))
  cg.barrier()
  (names,) = stops
  assert names["x"] == -1.0
  assert isinstance(names["x"], np.ndarray)
  assert np.isnan(names["why"]["y"])
  assert names["lane"] is None
  assert stops.frames == [(FILE, WHERE, "root")]
  assert stops.outer[0][:2] == ["root", "outer"]


def test_without_a_condition_every_execution_stops(engine: str, stops: Stops) -> None:
  def step(carry: Any, x: Any) -> Any:
    cg.breakpoint(step=x)
    return carry + x, None

  jax.block_until_ready(jax.jit(lambda xs: jax.lax.scan(step, 0, xs))(jnp.arange(3)))
  assert [int(names["step"]) for names in stops] == [0, 1, 2]


def test_values_that_change_go_back_to_the_program(engine: str, stops: Stops) -> None:
  @jax.jit
  def f(x: Any) -> Any:
    x, key = cg.breakpoint(x[0] < 0, out=("x", "key"), x=x, key=jax.random.key(7), n=3)
    return x + 1, jax.random.key_data(key)

  stops.edits.append(lambda names: names.update(x=names["x"] * 0 - 5))
  assert f(jnp.array([1.0, 2.0]))[0].tolist() == [2.0, 3.0]
  got, key = f(jnp.array([-1.0, 2.0]))
  assert got.tolist() == [-4.0, -4.0]
  np.testing.assert_array_equal(key, jax.random.key_data(jax.random.key(7)))
  assert len(stops) == 1
  assert stops[0]["n"] == 3


def test_a_value_of_another_type_is_asked_for_again(
  stops: Stops, capfd: pytest.CaptureFixture[str]
) -> None:
  @jax.jit
  def f(x: Any) -> Any:
    return cg.breakpoint(out="x", x=x)

  stops.edits += [
    lambda names: names.update(x=np.zeros(2)),
    lambda names: names.pop("x"),
    lambda names: names.update(x=4),
  ]
  assert f(jnp.float32(1)) == 4.0
  assert len(stops) == 3
  said = capfd.readouterr().err
  assert "breakpoint: x: expected float32[], got float64[2]" in said
  assert "breakpoint: x: expected a value, got none" in said


def test_lanes_stop_each_by_itself(engine: str, stops: Stops) -> None:
  def lane(x: Any, shared: Any) -> Any:
    return cg.breakpoint(x > 1, out="y", x=x, y=shared)

  stops.edits.append(lambda names: names.update(y=names["y"] + names["x"]))
  rows = jnp.array([[0.0, 2.0], [3.0, 1.0]])
  got = jax.jit(jax.vmap(jax.vmap(lane, (0, None)), (0, None)))(rows, 10.0)
  assert got.tolist() == [[10.0, 12.0], [13.0, 10.0]]
  if engine == "callgate":
    assert [names["lane"] for names in stops] == [(0, 1), (1, 0)]


def test_devices_stop_each_by_itself(engine: str, stops: Stops) -> None:
  mesh = jax.make_mesh((4,), ("d",))
  x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
  def f(x: Any) -> Any:
    return cg.breakpoint(x[0] == 4, out="x", x=x)

  stops.edits.append(lambda names: names.update(x=-names["x"]))
  assert f(x).tolist() == [0, 1, 2, 3, -4, -5, 6, 7]
  assert len(stops) == 1
  assert stops[0]["shard"] == 2


def test_a_partitioned_program_stops(engine: str, stops: Stops) -> None:
  mesh = jax.make_mesh((4,), ("d",))
  x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))

  @jax.jit
  def f(x: Any) -> Any:
    cg.breakpoint(x.sum() > 0, x=x)
    return x * 2

  assert f(x).tolist() == (2 * np.arange(8.0)).tolist()
  cg.barrier()
  assert sorted({float(v) for names in stops for v in names["x"]}) == list(range(8))


def test_derivatives_are_those_of_the_value(stops: Stops) -> None:
  def f(x: Any) -> Any:
    return jnp.sin(cg.breakpoint(x > 1, out="x", x=x)) ** 2

  truth = lambda x: jnp.sin(x) ** 2
  for transform in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.grad(jax.checkpoint(f))):
    np.testing.assert_allclose(jax.jit(transform(f))(0.3), transform(truth)(0.3), rtol=1e-6)


@pytest.mark.parametrize("number", [2, 11])
def test_under_the_table_of_transformations(stops: Stops, number: int) -> None:
  def make(effect: Any) -> Any:
    del effect

    def f(x: Any) -> Any:
      return reference(cg.breakpoint(jnp.isnan(x).any(), out="x", x=x))

    return f

  assert_chains_agree(diagonal(number), make=make)
  assert not stops


def test_values_that_change_under_the_table(stops: Stops) -> None:
  def make(effect: Any) -> Any:
    del effect
    return lambda x: reference(cg.breakpoint(out="x", x=x))

  truth = lambda x: reference(x + jax.lax.stop_gradient(x))
  stops.edits.append(lambda names: names.update(x=2 * names["x"]))
  chains = diagonal(5)
  assert_chains_agree(chains, make=make, truth=truth)
  assert len(stops) > 2 * len(chains)


def test_switched_off_without_a_new_compilation(engine: str, stops: Stops) -> None:
  traced: list[int] = []

  @jax.jit
  def f(x: Any) -> Any:
    traced.append(1)
    cg.check(x > 0, "not positive")
    return cg.breakpoint(x < 0, out="x", x=x)

  with cg.config(breakpoints=False, checks=False):
    assert f(-1.0) == -1.0
  assert not stops
  with cg.config(checks=False):
    assert f(-1.0) == -1.0
  assert len(stops) == 1
  with pytest.raises(cg.CheckError), cg.errors():
    f(-1.0)
  assert traced == [1]


def test_pythons_own_switch(monkeypatch: pytest.MonkeyPatch, stops: Stops) -> None:
  monkeypatch.setenv("PYTHONBREAKPOINT", "0")
  assert np.isnan(root(-3.0))
  assert not stops


def test_leaving_ends_the_program(engine: str, stops: Stops) -> None:
  def leave(names: Any) -> None:
    raise KeyboardInterrupt

  stops.edits.append(leave)
  with pytest.raises(KeyboardInterrupt), cg.errors():
    jax.block_until_ready(root(-1.0))
  stops.edits.clear()
  assert root(9.0) == 3.0


def test_wrong_arguments() -> None:
  for arguments, message in (
    ({"when": 1.0}, r"breakpoint: when: expected a bool of shape \(\), got float32\[\]"),
    (
      {"when": jnp.ones(2, bool)},
      r"breakpoint: when: expected a bool of shape \(\), got bool\[2\]",
    ),
    ({"when": "x"}, r"breakpoint: when: expected a bool of shape \(\), got str"),
    ({"x": "text"}, "breakpoint: x: expected an array or a pytree of arrays, got str"),
    ({"out": "y", "x": 1}, r"breakpoint: out: expected names of values \(x\), got 'y'"),
    ({"out": 3, "x": 1}, "breakpoint: out: expected the name of a value"),
  ):
    with pytest.raises(cg.GateDefinitionError, match=message):
      cg.breakpoint(**arguments)


PROGRAM = """
import jax, jax.numpy as jnp
import callgate as cg

def f(x):
  y = x * 2
  y = cg.breakpoint(y[0] < 0, out="y", x=x, y=y)
  return y

def outer(x):
  return f(x) + 1

program = jax.jit(outer)
try:
  with cg.errors():
    print("result", program(jnp.array([-1.0, 3.0])).tolist(), flush=True)
except KeyboardInterrupt:
  print("left", flush=True)
print("usable", program(jnp.array([1.0])).tolist(), flush=True)
"""


def test_pdb_at_the_users_line(tmp_path: Any) -> None:
  script = tmp_path / "run.py"
  script.write_text(PROGRAM)
  typed = "p x.max()\np lane, shard\nw\nu\np __name__\nd\ny = y + 10\nc\n"
  done = subprocess.run(
    [sys.executable, str(script)], input=typed, capture_output=True, text=True, check=True,
    timeout=120,
  )  # fmt: skip
  assert "run.py(7)f()" in done.stdout
  assert '-> y = cg.breakpoint(y[0] < 0, out="y", x=x, y=y)' in done.stdout
  assert "3.0" in done.stdout
  assert "(None, None)" in done.stdout
  assert "run.py(11)outer()" in done.stdout
  assert "session.py" not in done.stdout
  assert "result [9.0, 17.0]" in done.stdout
  assert "usable [3.0]" in done.stdout
  assert f"callgate: breakpoint at {script}:7" in done.stderr


BESIDE = """
import pdb, sys
import jax, jax.numpy as jnp
import callgate as cg

traced = []

def tracer(frame, event, arg):
  traced.append(event)

own = pdb.Pdb(nosigint=True, readrc=False)  # as `breakpoint()` keeps it, since Python 3.14
pdb.Pdb._last_pdb_instance = own
monitoring = getattr(sys, "monitoring", None)
program = jax.jit(lambda x: cg.breakpoint(out="x", x=x) + 1)
sys.settrace(tracer)
print("result", float(program(1.0)))
assert sys.gettrace() is tracer
sys.settrace(None)
assert traced
assert pdb.Pdb._last_pdb_instance is own
assert monitoring is None or monitoring.get_tool(monitoring.DEBUGGER_ID) is None
print("result", float(program(2.0)))
"""


def test_a_debugger_and_a_tracer_of_the_user_stay(tmp_path: Path) -> None:
  script = tmp_path / "run.py"
  script.write_text(BESIDE, encoding="utf-8")
  done = subprocess.run(
    [sys.executable, str(script)], input="x = x * 10\nc\nx = x * 100\nc\n", capture_output=True,
    text=True, timeout=120,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "result 11.0" in done.stdout
  assert "result 201.0" in done.stdout


def test_a_process_without_a_terminal_is_attached_to(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  script = tmp_path / "run.py"
  script.write_text(PROGRAM)
  monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
  program = interpreters.start(script)
  try:
    for line in program.stderr or ():
      if "python -m callgate attach" in line:
        break
    assert line.split()[-1] == str(program.pid)
    assert main(["attach", "1"]) == 1
    assert "process 1 doesn't wait at a breakpoint" in capsys.readouterr().err
    done = subprocess.run(
      [sys.executable, "-m", "callgate", "attach"], input="p x.tolist()\nq\n",
      capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "[-1.0, 3.0]" in done.stdout
    out, _ = program.communicate(timeout=120)
    assert out.split("\n")[:2] == ["left", "usable [3.0]"]
    assert (tmp_path / "callgate").stat().st_mode & 0o077 == 0
  finally:
    program.kill()


def test_a_program_whose_stdin_is_a_pipe_says_what_it_waits_for(tmp_path: Path) -> None:
  environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
  program = subprocess.Popen(
    [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, text=True, env=environment,
  )  # fmt: skip
  try:
    lines = iter(program.stderr or ())
    first = next(line for line in lines if "waits at a breakpoint" in line)
    assert first.endswith("until pdb gets c (continue) or q (quit)\n")
    assert next(lines) == (
      "callgate: write pdb's commands to its stdin, or run on this machine: "
      f"python -m callgate attach {program.pid}\n"
    )
    out, _ = program.communicate("c\n", timeout=120)
    assert "result [-1.0, 7.0]" in out
  finally:
    program.kill()


@pytest.mark.parametrize("typed", ["", "p x\np y\n"])
def test_a_hang_up_is_no_end(tmp_path: Path, typed: str) -> None:
  """The program waits at its breakpoint for another debugger."""
  environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
  program = interpreters.start(PROGRAM, environment=environment)
  path = tmp_path / "callgate" / f"{program.pid}.sock"

  def talk(text: str) -> socket.socket:
    until(path.exists, "the program waits")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    connection.sendall(text.encode())
    until(lambda: not path.exists(), "the debugger runs")
    return connection

  try:
    for _ in range(2):
      talk(typed).close()
    with talk("c\n") as connection:  # a hang-up may come before what was typed is read
      while connection.recv(1 << 16):
        pass
    out, err = program.communicate(timeout=120)
    assert out.split("\n")[0] == "result [-1.0, 7.0]"
    assert err.count("the debugger disconnected") == 2
  finally:
    program.kill()


def test_a_runtime_folder_that_is_not_there_is_not_made(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run" / "user" / "7"))
  assert attach.folder() == tmp_path / f"callgate-{os.getuid()}"
  assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_a_wait_once_and_later_ones_begin_anew(tmp_path: Path) -> None:
  code = """
    import os, signal, threading, time
    import jax
    import callgate as cg

    program = jax.jit(lambda x: cg.breakpoint(out="x", x=x) + 1)
    waits = lambda: any(name.endswith(".sock") for name in os.listdir(folder))
    folder = os.path.join(os.environ["XDG_RUNTIME_DIR"], "callgate")
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
      while not os.path.isdir(folder) or not waits():
        time.sleep(0.01)
      sent.append(1)
      os.kill(os.getpid(), signal.SIGINT)

    for turn in range(3):  # each begins within a second of the Ctrl-C before
      sent = []
      thread = threading.Thread(target=interrupt)
      thread.start()
      try:
        try:
          jax.block_until_ready(program(1.0))
        except jax.errors.JaxRuntimeError:
          pass  # a KeyboardInterrupt follows
        print("ended by itself", flush=True)
      except KeyboardInterrupt:
        print("interrupted", sent, flush=True)
      thread.join()
      try:
        time.sleep(0.3)
      except KeyboardInterrupt:
        print("interrupted again", flush=True)
    os._exit(0)
  """
  assert output_of(code, XDG_RUNTIME_DIR=str(tmp_path)) == "interrupted [1]\n" * 3
