# SPDX-License-Identifier: Apache-2.0
"""Programs that outlive their process: export, and the persistent cache.

`PROGRAMS` is run here and in fresh processes, which get it as source text.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest
from interpreters import printed_by
from jax import export
from programs import CACHED

import callgate as cg

# Gates by name, as a user's library would define them, and programs that call them.
GATES = textwrap.dedent("""
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  SEEN = []

  def note(x):
    SEEN.append(float(x))
    return x * 2

  same = lambda x, **_: x
  sort = cg.gate(np.sort, out=same, name="export.sort")
  tree = cg.gate(
    lambda t: {"s": t["a"] + t["b"][0], "n": (t["b"][0],)},
    out=lambda t: {"s": t["a"], "n": (t["a"],)}, name="export.tree",
  )
  scale = cg.gate(lambda x, by, how: x * by, out=same, name="export.scale")
  io = cg.gate(note, out=same, name="export.io", effect="io")
  ordered = cg.gate(note, out=same, name="export.ordered", effect="ordered")
""")
PROGRAMS = textwrap.dedent("""
  X = jnp.array([3.0, 1.0, 2.0])
  PROGRAMS = {
    "plain": (lambda x: sort(x) + 1, X),
    "pytrees": (lambda x: tree({"a": x, "b": [x, None]}), X),
    "static keywords": (lambda x: scale(x, by=3, how=("a", None, 2.5)), X),
    "vmap": (jax.vmap(jax.vmap(sort, (None,), 0, axis_size=2)), jnp.stack([X, -X])),
    "io": (lambda x: jax.lax.map(io, x), X),
    "ordered": (lambda x: jax.lax.scan(lambda c, v: (ordered(c), ordered(v)), 5.0, x), X),
    "lanes apart": (
      jax.vmap(lambda v: jax.lax.cond(v > 1, ordered, lambda u: u, v)), X
    ),
  }
""")
# Objects of one process, in programs that another finds by the same text.
OBJECTS = textwrap.dedent("""
  import dataclasses

  class Log:
    pass

  @dataclasses.dataclass(frozen=True)
  class Config:
    log: Log

  noted = cg.gate(lambda x, **_: x, out=same, name="export.noted")
  objects = Log(), Log(), Config(Log()), lambda: None
  PROGRAMS["objects"] = (lambda x: [noted(x, log=one) for one in objects], X)
""")
# A fresh process prints this of the exported programs that it calls: results, and calls seen.
CALL = textwrap.dedent("""
  import json, pathlib, sys
  from jax import export
  for name, x in json.loads(sys.argv[2]).items():
    loaded = export.deserialize(bytearray(pathlib.Path(sys.argv[1], name).read_bytes()))
    SEEN.clear()
    got = loaded.call(jnp.array(x))
    jax.effects_barrier()
    print(json.dumps([name, jax.tree.map(lambda v: v.tolist(), got), SEEN]))
""")

_here: dict[str, Any] = {}
exec(GATES + PROGRAMS, _here)
NAMES = list(_here["PROGRAMS"])


def export_to(folder: Path, name: str) -> Any:
  """Exports a program to a file; returns its argument as a list."""
  function, x = _here["PROGRAMS"][name]
  exported = export.export(jax.jit(function), disabled_checks=cg.export_checks())(x)
  (folder / name).write_bytes(exported.serialize())
  return x.tolist()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  """The results of each program, exported here, in a fresh process."""
  folder = tmp_path_factory.mktemp("exported")
  arguments = {name: export_to(folder, name) for name in NAMES}
  printed = printed_by(GATES + CALL, str(folder), json.dumps(arguments))
  return {name: rest for name, *rest in map(json.loads, printed.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_exported_programs_run_in_a_fresh_process(name: str, elsewhere: Any) -> None:
  function, x = _here["PROGRAMS"][name]
  _here["SEEN"].clear()
  got = jax.tree.map(lambda v: v.tolist(), jax.jit(function)(x))
  jax.effects_barrier()
  assert elsewhere[name] == json.loads(json.dumps([got, _here["SEEN"]]))


def test_without_the_checks_export_refuses_and_names_the_target() -> None:
  function, x = _here["PROGRAMS"]["plain"]
  with pytest.raises(ValueError, match=r"callgate\.gate"):
    export.export(jax.jit(function))(x)


# -- the persistent cache ------------------------------------------------------------------------
def loop_with_a_bar(x: Any) -> Any:
  return jax.lax.fori_loop(0, 3, cg.progress("b")(lambda _, c: c * 2), x)


def io_gate(x: Any) -> Any:
  return cg.gate(lambda x: x, out=lambda x: x, effect="io", name="export.by_jax")(x)


@pytest.mark.parametrize(
  ("function", "options", "engine", "message"),
  [
    (loop_with_a_bar, "split", "callgate", r"progress bar .*XLA splits.*jax\.shard_map around it"),
    (loop_with_a_bar, "", "jax", r"progress bar .*\(engine='jax'\).*engine='callgate'"),
    (lambda x: cg.tap(x, "export"), "", "jax", r"tap 'export' goes .*\(engine='jax'\)"),
    (io_gate, "tpu", "callgate", r"gate 'export\.by_jax' .*\(for platform tpu\).*cpu or cuda"),
  ],
)
def test_a_call_through_jaxs_own_callback_is_refused_with_the_reason(
  function: Any, options: str, engine: Any, message: str
) -> None:
  if options == "split" and len(jax.devices()) == 1:
    pytest.skip("needs two devices")
  devices = jax.sharding.Mesh(jax.devices()[:2], ("d",))
  split = jax.NamedSharding(devices, jax.P("d")) if options == "split" else None
  program = jax.jit(function, in_shardings=split, out_shardings=split)
  to = export.export(program, platforms=[options]) if options == "tpu" else export.export(program)
  with (
    cg.config(engine=engine),
    pytest.raises(cg.GateDefinitionError, match=f"^jax.export: .*{message}"),
  ):
    to(jax.ShapeDtypeStruct((4,), "float32"))


def test_a_second_process_finds_every_program_in_the_persistent_cache(tmp_path: Path) -> None:
  code = GATES + PROGRAMS + OBJECTS + CACHED + "print(SEEN)"
  printed = (printed_by(code, str(tmp_path), PYTHONHASHSEED=seed) for seed in "12")
  (*first, seen), (*second, seen_again) = (
    [line.split(": ", 2) for line in text.splitlines()] for text in printed
  )
  assert [line[:2] for line in second] == [[name, "1"] for name in (*NAMES, "objects")]
  assert [line[2] for line in first] == [line[2] for line in second]
  assert seen == seen_again


def test_static_values_that_modules_hold_and_complex_numbers_travel(tmp_path: Path) -> None:
  gate = """
    import sys, json, pathlib, callgate as cg, jax, jax.export, jax.numpy as jnp
    @cg.gate(out=lambda x, **_: x, name="test travels", effect="io")
    def show(x, *, k, pair):
      print(k if isinstance(k, complex) else k.__module__ + "." + k.__qualname__, pair[1] is dict)
      return x
  """
  values = "json.dumps", "json.JSONEncoder", "complex(-0.0, 1)", "jnp.sum"
  written = textwrap.dedent(gate) + textwrap.dedent(f"""
    for number, k in enumerate([{", ".join(values)}]):
      program = jax.jit(lambda x: show(x, k=k, pair=(1, dict)))
      exported = jax.export.export(program, disabled_checks=cg.export_checks())(jnp.float32(1))
      pathlib.Path(sys.argv[1], str(number)).write_bytes(exported.serialize())
  """)
  read = textwrap.dedent(gate) + textwrap.dedent(f"""
    for number in range({len(values)}):
      exported = jax.export.deserialize(pathlib.Path(sys.argv[1], str(number)).read_bytes())
      with cg.errors():
        jax.jit(exported.call)(jnp.float32(1))
  """)
  printed_by(written, str(tmp_path))
  lines = printed_by(read, str(tmp_path)).splitlines()
  assert lines[:3] == ["json.dumps True", "json.encoder.JSONEncoder True", "(-0+1j) True"]
  assert lines[3].endswith("sum True")


# A module of a user's, with types that are pytrees and gates that have gates of their own.
LIBRARY = """
  import dataclasses, enum, functools, operator, typing
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  class Pair(typing.NamedTuple):
    a: typing.Any
    b: typing.Any

  @dataclasses.dataclass
  class Tagged:
    x: typing.Any
    tag: typing.Any

  if REGISTERS:
    jax.tree_util.register_dataclass(Tagged, data_fields=["x"], meta_fields=["tag"])

  class Mode(enum.Enum):
    FAST = enum.auto()

  class Bits(enum.IntFlag):
    LOW = 1
    HIGH = 2

  @dataclasses.dataclass(frozen=True)
  class Settings:
    mode: Mode
    rate: typing.Any = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
      assert self.rate != 7  # once, where it was made

  SETTINGS = Settings(Mode.FAST, rate=np.float32(0.1))
  TAG = ("name", 1.5, np.sort, Mode.FAST, Bits.HIGH, SETTINGS, Pair(np.int8(-3), SETTINGS))

  def same_things(got, wanted):
    types = [type(one) for one in got] == [type(one) for one in wanted]
    return got == wanted and types and type(got[5].rate) is np.float32

  class Scale:
    def __init__(self):
      self.by = 3

    def __call__(self, x):
      return x

    def times(self, x):
      return self.by * x

  def double(pair):
    tagged = pair.b["t"]
    assert same_things(tagged.tag, TAG), tagged.tag
    return Pair(2 * pair.a, Tagged(tagged.x, tagged.tag))

  def dot(held, x):
    return np.float32(held @ x)

  def into(out, held, x):
    out[...] = held @ x

  same = lambda x: x
  doubled = cg.gate(
    double, out=lambda pair: Pair(pair.a, pair.b["t"]), name="library.double"
  )
  def first(tree, *, settings, pair):
    assert tree["mode"] is Mode.FAST and settings == SETTINGS
    return pair.a * tree["x"]

  options = cg.gate(first, out=lambda tree, **_: tree["x"], name="library.options")
  square = cg.gate(lambda x: x * x, out=same, name="library.square", effect="io")
  slow = cg.gate(lambda pair: pair.a * pair.b, out=lambda pair: pair.a, name="library.slow")
  far = cg.gate(np.negative, out=same, name="library.far", run_on=cg.workers(1))
  scale = cg.gate(Scale, out=same, name="library.scale", run_on=cg.workers(1))
  keep = cg.hold(lambda x: x.copy(), name="library.keep")
  listed = cg.hold(list, name="library.list")
  number = jax.ShapeDtypeStruct((), jnp.float32)

  def of_types(x):
    found = doubled(Pair(x, {"t": Tagged(x, TAG)}))
    return found.a + found.b.x

  def static_values(x):
    tree = {"x": x, "mode": Mode.FAST}
    return options(tree, settings=SETTINGS, pair=Pair(np.float32(2), Mode.FAST))

  def started(x):
    tickets = square.start(x), slow.start(Pair(x, x)), far.start(x)
    return sum(ticket.result() for ticket in tickets)

  def started_in_lanes_and_steps(x):
    each = jax.vmap(lambda v: square.start(v).result())(x)
    return jax.lax.scan(lambda c, v: (c + square.start(v).result(), v), 0.0, each)[0]

  def methods(x):
    return scale.times(x) + scale.times.start(x).result()

  def objects(x):
    held = keep(x)
    return cg.use(dot, held, x, out=number) + cg.use(
      into, held, x, out=number, style="inplace", effect="io", run_on="xla")

  class Times:
    def __init__(self, by):
      self.by = by

    def __call__(self, held, x):
      return np.float32(self.by * (held @ x))

    @classmethod
    def plain(cls, held, x):
      return cls(1)(held, x)

  times = Times(10)

  def weighted(weight, held, x, *, more):
    return np.float32(weight.rate * more[0] * len(more[1]) * (held @ x))

  def callables(x):
    held = keep(x)
    weight = functools.partial(weighted, SETTINGS, more=(10, "#[(,=:{"))
    made = weight, functools.partial(weight), times, times.__call__, Times.plain
    first = cg.use(operator.itemgetter(0), listed(x + 1), out=number)
    return first + sum(cg.use(one, held, x, out=number) for one in made)

  PROGRAMS = [
    of_types, static_values, started, started_in_lanes_and_steps, methods, objects, callables
  ]
"""
EXPORTS = """
  import sys, pathlib, library, callgate as cg, jax, jax.numpy as jnp, jax.export
  x = jnp.arange(3.0)
  for program in library.PROGRAMS:
    for _ in range(2):  # gates of the first trace have the names
      exported = jax.export.export(jax.jit(program), disabled_checks=cg.export_checks())(x)
    pathlib.Path(sys.argv[1], program.__name__).write_bytes(exported.serialize())
"""
LOADS = """
  import sys, pathlib, library, jax, jax.numpy as jnp, jax.export
  x = jnp.arange(3.0)
  for program in library.PROGRAMS:
    data = pathlib.Path(sys.argv[1], program.__name__).read_bytes()
    loaded = jax.export.deserialize(bytearray(data))
    try:
      got = [jax.jit(loaded.call)(x) for _ in range(2)]
    except Exception as error:
      print(program.__name__, "expected a type that its module registers" in str(error))
    else:
      print(program.__name__, got[0].tolist(), bool((got[0] == got[1]).all()))
"""


def test_types_and_gates_of_a_module_are_found_by_programs_from_elsewhere(tmp_path: Path) -> None:
  """The process that loads them imports the module, and traces nothing."""

  def run(code: str, *, registers: bool = True) -> list[str]:
    library = textwrap.dedent(LIBRARY).replace("REGISTERS", str(registers))
    (tmp_path / "library.py").write_text(library)
    return printed_by(code, str(tmp_path), PYTHONPATH=str(tmp_path)).splitlines()

  run(EXPORTS)
  right = [
    "static_values [0.0, 2.0, 4.0] True",
    "started [0.0, 1.0, 6.0] True",
    "started_in_lanes_and_steps 17.0 True",
    "methods [0.0, 6.0, 12.0] True",
    "objects 10.0 True",
    "callables 176.0 True",
  ]
  assert run(LOADS) == ["of_types [0.0, 3.0, 6.0] True", *right]
  assert run(LOADS, registers=False) == ["of_types True", *right]
