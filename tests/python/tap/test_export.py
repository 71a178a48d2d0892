# SPDX-License-Identifier: Apache-2.0
"""Programs with taps that travel: exported ones, and the persistent compilation cache."""

from __future__ import annotations

import functools
import pickle
import weakref

import jax
import numpy as np
import pytest
from free_threaded import frees_functions
from interpreters import output_of
from jax import export
from jax.experimental import serialize_executable
from programs import drop_programs

import callgate as cg

X = np.float32(1)

EXPORT = """
import callgate as cg, jax, jax.numpy as jnp, pathlib
from jax import export
def f(x):
  def step(c, y):
    return cg.tap(cg.tap(c + y, "loss") + 0.5, "later", effect="dataflow"), y
  return jax.lax.scan(step, 0.0, x)[0]
checks = cg.export_checks()
shape = jax.ShapeDtypeStruct((3,), jnp.float32)
exported = export.export(jax.jit(f), disabled_checks=checks)(shape)
pathlib.Path({path!r}).write_bytes(exported.serialize())
"""
RUN = """
import callgate as cg, jax.numpy as jnp, pathlib
from jax import export
exported = export.deserialize(bytearray(pathlib.Path({path!r}).read_bytes()))
infos = []
note = lambda value, info: infos.append((info.name, float(value)))
with cg.channel("loss", to=note), cg.channel("later", to=note):
  exported.call(jnp.arange(1.0, 4.0))
print(sorted(infos))
"""


def test_an_exported_program_taps_in_a_process_that_never_traced_it(tmp_path):
  pytest.importorskip("flatbuffers")
  path = str(tmp_path / "program.bin")
  output_of(EXPORT.format(path=path))
  assert b"0x" not in (tmp_path / "program.bin").read_bytes()
  later = [("later", 1.5), ("later", 4.0), ("later", 7.5)]
  loss = [("loss", 1.0), ("loss", 3.5), ("loss", 7.0)]
  assert output_of(RUN.format(path=path)) == f"{later + loss}\n"


# -- what prints, checks and bars say --------------------------------------------------------------
SAYS = """
import callgate as cg, jax, numpy as np, pathlib, pickle, sys
from jax import export
from jax.experimental import serialize_executable
folder = pathlib.Path({path!r})
"""
WRITES = """
THIRDS = np.full(2, 1 / 3, np.float32)
def program(x):
  with np.printoptions(precision=2):
    cg.print("loss {} of {name!r} {tree}", x * THIRDS, "run", tree={"a": x, "b": (None, "c")},
             ordered=True)
  cg.print("no fields", x, ordered=True, skip_format_check=True)
  cg.check(x > 0, "expected more than 0, got {x}", x=x)
  return cg.scan(lambda c, v: (c + v, v), x, np.ones(3, np.float32), progress="train")[0]
exported = export.export(jax.jit(program), disabled_checks=cg.export_checks())(np.float32(1))
(folder / "exported").write_bytes(exported.serialize())
compiled = serialize_executable.serialize(jax.jit(program).lower(np.float32(1)).compile())
(folder / "compiled").write_bytes(pickle.dumps(compiled))
"""
OTHERS = """
def others(x):
  cg.print("epoch {}", x)
  cg.print("other fields", x, skip_format_check=True)
  cg.check(x > 0, "another message")
  return cg.scan(lambda c, v: (c, v), x, np.ones(3, np.float32), progress="other")[0]
jax.jit(others)(np.float32(7))
cg.barrier()
"""
READS = """
sys.stderr = sys.stdout  # for bars
exported = export.deserialize(bytearray((folder / "exported").read_bytes()))
compiled = serialize_executable.deserialize_and_load(
  *pickle.loads((folder / "compiled").read_bytes()), execution_devices=jax.devices()[:1]
)
for program in (exported.call, compiled):
  cg.barrier()
  print("-- ")
  jax.block_until_ready(program(np.float32(1)))
  cg.barrier()
  try:
    with cg.errors():
      jax.block_until_ready(program(np.float32(-1)))
  except cg.CheckError as error:
    sys.stdout.write(error.message + chr(10))  # at once, beside the prints
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  pytest.importorskip("flatbuffers")
  path = str(tmp_path_factory.mktemp("says"))
  output_of(SAYS.format(path=path) + WRITES)
  return path


@pytest.mark.parametrize("others", ["", OTHERS])
def test_prints_checks_and_bars_say_their_own_in_other_processes(others, written):
  said = output_of(SAYS.format(path=written) + others + READS)
  for part in said.split("-- ")[1:]:
    assert "loss [0.33 0.33] of 'run' {'a': Array(1., dtype=float32), 'b': (None, 'c')}\n" in part
    assert "no fields 1.0\n" in part
    assert "expected more than 0, got -1.0\n" in part
    assert "epoch" not in part
    assert "other" not in part
  assert "train" in said


# -- taps to functions -----------------------------------------------------------------------------
def consumer(value):
  del value


class Consumer:
  def __call__(self, value):
    del value

  def method(self, value):
    del value


FUNCTIONS = {
  "lambda": lambda value: None,
  "object": Consumer(),
  "method": Consumer().method,
  "partial": functools.partial(consumer),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_tap_to_a_function_of_this_process_alone_is_not_exported(kind):
  program = jax.jit(lambda x: cg.tap(x, FUNCTIONS[kind], name="loss"))
  with pytest.raises(cg.GateDefinitionError, match=r"tap 'loss': other processes.* channel's name"):
    export.export(program, disabled_checks=cg.export_checks())(X)
  with pytest.raises(pickle.PicklingError, match="can't go to another one"):
    serialize_executable.serialize(program.lower(X).compile())
  program(X)


MODULE = """
import callgate as cg, jax, numpy as np, pathlib, sys
from jax import export
path, seen = pathlib.Path({path!r}), []
def note(value):
  seen.append(float(value))
"""
TO_MODULE = """
for _ in range(2):  # the second tap is another one, of the same name
  program = jax.jit(lambda x: cg.tap(x, note))
  exported = export.export(program, disabled_checks=cg.export_checks())(np.float32(1))
  jax.clear_caches()
path.write_bytes(exported.serialize())
"""
FROM_MODULE = """
program = export.deserialize(bytearray(path.read_bytes()))
try:
  program.call(np.float32(1))
except Exception as error:
  print("taps to the function '__main__.note'" in str(error), "cg.tap(x, 'loss')" in str(error))
traced = jax.jit(lambda x: cg.tap(x, note))
traced(np.float32(2))
program.call(np.float32(3))
cg.barrier()
print(seen)
"""


def test_a_tap_to_a_module_s_function_finds_it_in_another_process(tmp_path):
  pytest.importorskip("flatbuffers")
  module = MODULE.format(path=str(tmp_path / "program"))
  output_of(module + TO_MODULE)
  assert output_of(module + FROM_MODULE).splitlines() == ["True True", "[2.0, 3.0]"]


# -- what records hold -----------------------------------------------------------------------------
class Shown:
  def __init__(self, text):
    self.text = text

  def __format__(self, how):
    return self.text


@frees_functions
def test_a_print_of_an_object_ends_with_its_program(capsys, clean_caches):
  alive = []

  def once(number):
    one = Shown(f"object {number}")
    alive.append(weakref.ref(one))
    jax.jit(lambda x: cg.print("{} {}", one, x))(X)

  for number in range(10):
    once(number)
  drop_programs()  # records may wait, and show their objects all the same
  cg.barrier()
  drop_programs()
  lines = capsys.readouterr().out.splitlines()
  assert lines == [f"object {number} 1.0" for number in range(10)]
  assert not any(one() for one in alive)


def test_equal_prints_outside_of_programs_are_one_program(capsys):
  for step in range(3):
    cg.print("{x} {y}", x=np.float32(step), y="z")
    cg.print("{x} {y}", x=np.float32(step), y=-0.0 if step else 0.0)
  cg.barrier()
  expected = ["0.0 z", "0.0 0.0", "1.0 z", "1.0 -0.0", "2.0 z", "2.0 -0.0"]
  assert capsys.readouterr().out.splitlines() == expected
