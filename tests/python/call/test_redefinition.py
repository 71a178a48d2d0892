# SPDX-License-Identifier: Apache-2.0
"""A notebook's cells that run again, and modules that are loaded again, redefine what they made."""

from __future__ import annotations

import gc
import importlib
import pathlib
import sys
import textwrap
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from free_threaded import frees_functions
from interpreters import output_of
from property_checks import is_soak
from waiting import until

import callgate as cg
from callgate import _callgate
from callgate._core import registry
from callgate._core.public import core

X = jnp.array([3.0, 1.0, 2.0])


class Notebook:
  """Runs cells as IPython does: in one namespace, that of `__main__`, each time compiled anew."""

  def __init__(self) -> None:
    self.names: dict[str, Any] = {"__name__": "__main__"}
    self.run("import callgate as cg, jax, jax.numpy as jnp, numpy as np")

  def run(self, cell: str, factor: int = 1, **values: Any) -> None:
    self.names.update(values)
    text = textwrap.dedent(cell).replace("FACTOR", str(factor))
    exec(compile(text, "<cell>", "exec"), self.names)

  def __getattr__(self, name: str) -> Any:
    return self.names[name]


MAKERS = {
  "gate": """
    @cg.gate(out=lambda x: x, name="again")
    def f(x):
      return FACTOR * x
  """,
  "gate with a rule": """
    @cg.gate(out=lambda x: x, name="again", gradient="finite-difference")
    def f(x):
      return FACTOR * x
  """,
  "lambda": """
    f = cg.gate(lambda x: FACTOR * x, out=lambda x: x, name="again")
  """,
  "elementwise": """
    f = cg.elementwise("T x", "T y", "y = FACTOR * x", name="again", jvp="dy = FACTOR * dx")
  """,
  "torch": """
    f = cg.torch(lambda x: FACTOR * x, name="again")
  """,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_cell_that_runs_again_redefines_what_it_made(kind: str) -> None:
  if kind == "torch":
    pytest.importorskip(kind, reason=f"{kind} is not installed")
  notebook = Notebook()
  notebook.run(MAKERS[kind], factor=2)
  old = notebook.f
  program = jax.jit(lambda x: old(x) + 1)
  compiled = program.lower(X).compile()
  traced = program.trace(X)
  lowered = traced.lower()
  assert (program(X) == 2 * X + 1).all()
  notebook.run(MAKERS[kind], factor=3)
  new = notebook.f
  assert new is not old
  assert new.name == "again"
  assert (jax.jit(new)(X) == 3 * X).all()
  # Programs that were compiled, lowered or traced with the old one, and callers that call it still.
  assert (program(X) == 2 * X + 1).all()
  assert (compiled(X) == 2 * X + 1).all()
  assert (lowered.compile()(X) == 2 * X + 1).all()
  assert (traced.lower().compile()(X) == 2 * X + 1).all()
  assert (jax.vmap(program)(jnp.stack([X, X]))[1] == 2 * X + 1).all()
  assert old.name.startswith("again#")
  if kind in ("gate with a rule", "elementwise", "torch"):
    for gate, factor in ((old, 2), (new, 3)):
      grad = jax.jit(jax.grad(lambda x, gate=gate: gate(x).sum()))(X)
      np.testing.assert_allclose(grad, [factor] * 3, rtol=1e-2)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_cell_makes_is_renamed_as_soon_as_its_name_is_known(
  kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  if kind == "torch":
    pytest.importorskip(kind, reason=f"{kind} is not installed")

  def register(name: str, gate: Any) -> None:
    registered(name, gate)
    if name == "again":  # as another thread's cell does
      registry.rename(gate, f"{kind} known early")

  registered = registry.register
  monkeypatch.setattr(registry, "register", register)
  notebook = Notebook()
  notebook.run(MAKERS[kind], factor=2)
  assert notebook.f.name == f"{kind} known early"
  assert (jax.jit(notebook.f)(X) == 2 * X).all()


SOLVERS = {
  "linear solver": """
    f = cg.linear_solver(
      factor=lambda a: FACTOR * a, solve=lambda held, b: b / held,
      solve_transposed=lambda held, b: b / held, matvec=lambda a, x: FACTOR * a * x, name="again",
    )
  """,
  "root": """
    f = cg.root(
      lambda x, a: FACTOR * a * x - 1, solver=lambda a, start: 1 / (FACTOR * a), name="again"
    )
  """,
}


@pytest.mark.parametrize("kind", SOLVERS)
def test_a_solver_is_redefined_with_its_derivatives(kind: str) -> None:
  notebook, one = Notebook(), jnp.ones(1)
  notebook.run(SOLVERS[kind], factor=2)
  old = notebook.f
  program = jax.jit(jax.value_and_grad(lambda a: old(a, one).sum()))
  assert [float(y.sum()) for y in program(one)] == [0.5, -0.5]
  notebook.run(SOLVERS[kind], factor=4)
  new = jax.jit(jax.value_and_grad(lambda a: notebook.f(a, one).sum()))
  assert [float(y.sum()) for y in new(one)] == [0.25, -0.25]
  assert [float(y.sum()) for y in program(one)] == [0.5, -0.5]
  assert notebook.f.name == "again"
  assert old.name.startswith("again#")


@pytest.mark.parametrize("verb", ["call", "use"])
def test_a_line_calls_another_function_of_the_same_name_each_time_it_is_traced(verb: str) -> None:
  held = cg.hold(lambda: 10.0)()

  @jax.jit
  def program(x: jax.Array) -> jax.Array:
    size = x.size  # another function for each shape
    if verb == "call":
      return cg.call(lambda x: size * x, x, x, name=f"sized by {verb}")
    return cg.use(lambda ten, x: size * ten * x, held, x, out=x, name=f"sized by {verb}")

  factor = 10 if verb == "use" else 1
  for _ in range(2):
    for count in (2, 3, 1):
      assert program(jnp.ones(count)).tolist() == [factor * count] * count


def test_a_gate_is_redefined_as_a_kernel_and_back() -> None:
  notebook = Notebook()
  for kind, factor in (("gate", 2), ("elementwise", 3), ("torch", 4), ("lambda", 5)):
    if kind == "torch":
      pytest.importorskip("torch", reason="PyTorch is not installed")
    notebook.run(MAKERS[kind], factor=factor)
    assert (jax.jit(notebook.f)(X) == factor * X).all()


def test_derivatives_compiled_with_an_old_torch_function_are_its_own() -> None:
  pytest.importorskip("torch", reason="PyTorch is not installed")
  notebook = Notebook()
  cell = "f = cg.torch(lambda x: FACTOR * x * x, name='again')"
  notebook.run(cell, factor=1)
  old = notebook.f
  grad = jax.jit(jax.grad(lambda x: old(x).sum()))
  traced = grad.trace(X)
  assert (grad(X) == 2 * X).all()
  notebook.run(cell, factor=10)
  assert (jax.grad(lambda x: notebook.f(x).sum())(X) == 20 * X).all()
  assert (grad(X) == 2 * X).all()
  assert (traced.lower().compile()(X) == 2 * X).all()


def test_two_definitions_in_one_cell_are_a_mistake() -> None:
  notebook = Notebook()
  with pytest.raises(ValueError, match="'twice' is taken by another live gate"):
    notebook.run(
      """
      one = cg.gate(np.sort, out=lambda x: x, name="twice")
      two = cg.gate(np.abs, out=lambda x: x, name="twice")
      """
    )


def test_a_name_that_another_module_has_stays_an_error() -> None:
  mine = cg.gate(np.sort, out=lambda x: x, name="of this module")
  with pytest.raises(ValueError, match="'of this module' is taken by another live gate"):
    Notebook().run("cg.gate(np.sort, out=lambda x: x, name='of this module')")
  assert (jax.jit(mine)(X) == jnp.sort(X)).all()


MODULE = """
import callgate as cg

@cg.gate(out=lambda x: x, name="loaded again")
def f(x):
  return FACTOR * x

class Namespace:
  g = cg.elementwise("T x", "T y", "y = FACTOR * x", name="loaded again too")

def twice():
  return [cg.gate(lambda x: x, out=lambda x: x, name="by a function") for _ in range(2)]
"""


def test_a_module_that_is_loaded_again_redefines_its_gates(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, "dont_write_bytecode", True)
  (tmp_path / "reloaded.py").write_text(MODULE.replace("FACTOR", "2"))
  module = importlib.import_module("reloaded")
  old = module.f, module.Namespace.g
  programs = [jax.jit(f) for f in old]
  assert [(program(X) == 2 * X).all() for program in programs] == [True, True]
  (tmp_path / "reloaded.py").write_text(MODULE.replace("FACTOR", "3"))
  importlib.reload(module)
  assert [(program(X) == 2 * X).all() for program in programs] == [True, True]
  assert (module.f(X) == 3 * X).all()
  assert (module.Namespace.g(X) == 3 * X).all()
  # A function that defines two of one name has a mistake, in a module.
  with pytest.raises(ValueError, match="'by a function' is taken by another live gate"):
    module.twice()
  del sys.modules["reloaded"]


@frees_functions
def test_redefining_and_compiling_a_gate_does_not_pile_up(young_heap: None) -> None:
  notebook = Notebook()
  cell = """
    def make():
      def named(x):
        return x + number
      return named
    function = make()
    f = cg.gate(function, out=lambda x: x, name="piled")
    g = cg.gate(function, out=lambda x: x)
    loss = jax.jit(lambda x: f(x) + g(x))
    result = loss(jnp.ones(3))
    f(jnp.ones(3))
  """
  notebook.run(cell, number=0)
  before = len(_callgate.registered_names())
  watches: list[weakref.ref[Any]] = []
  for number in range(1, 201 if is_soak() else 21):
    notebook.run(cell, number=number)
    assert notebook.result[0] == 2 * (1 + number)
    watches.append(weakref.ref(notebook.function))

  def rest_is_gone() -> bool:
    gc.collect()
    _callgate.drain()
    return sum(watch() is not None for watch in watches) <= 1

  until(rest_is_gone, "gone, but for the last")
  assert len(_callgate.registered_names()) <= before + 2


# -- channels and feeds ----------------------------------------------------------------------------
def test_a_cell_that_opens_a_channel_again_closes_the_old_one(tmp_path: pathlib.Path) -> None:
  notebook = Notebook()
  cell = """
    channel = cg.channel("cells", to=[seen.append, cg.sinks.JSONL(path)])
    program = jax.jit(lambda x: cg.tap(x, "cells"))
    program(jnp.float32(number))
  """
  first: list[Any] = []
  second: list[Any] = []
  notebook.run(cell, seen=first, number=1, path=tmp_path / "rows.jsonl")
  old = notebook.channel
  notebook.run(cell, seen=second, number=2)
  assert first == [1.0]  # all that was there
  assert "closed" in repr(old)
  notebook.channel.close()
  assert second == [2.0]
  assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1  # begun anew
  old.close()


def test_a_channel_that_another_module_has_opened_stays_open() -> None:
  with cg.channel("this module's"), pytest.raises(ValueError, match="is open already"):
    Notebook().run('cg.channel("this module\'s")')


def test_a_cell_that_makes_a_feed_again_closes_the_old_one() -> None:
  notebook = Notebook()
  cell = """
    def numbers():
      for i in range(1000):
        yield np.float32(start + i)
    feed = cg.feed(numbers(), name="again and again")
    program = jax.jit(lambda: feed.next() + 0)
    first = program()
  """
  notebook.run(cell, start=0)
  old, program = notebook.feed, notebook.program
  threads = threading.active_count()
  notebook.run(cell, start=100)
  assert notebook.first == 100
  assert threading.active_count() == threads
  with pytest.raises(cg.GateError, match="is closed"):
    old.next()
  with pytest.raises(cg.GateError, match="is closed"), cg.errors():
    jax.block_until_ready(program())
  with pytest.raises(ValueError, match="taken by another live gate"):
    cg.feed([X], name="again and again")
  assert notebook.program() == 101
  notebook.feed.close()


def test_cells_of_a_real_notebook_run_again() -> None:
  """nbclient runs them in a kernel of its own."""
  pytest.importorskip("ipykernel", reason="ipykernel is not installed")
  nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
  nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
  cell = """
import callgate as cg, jax, jax.numpy as jnp, numpy as np
number = globals().get("number", 0) + 1

@cg.gate(out=lambda x: x, name="cell")
def f(x):
  return number * x

double = cg.elementwise("T x", "T y", f"y = {number} * x", name="cell's kernel")
values = cg.feed(iter([np.float32(number)] * 9), name="cell's feed")
losses = cg.channel("cell's channel", to=lambda x: print("tapped", x))

@jax.jit
def step(x):
  return cg.tap(double(f(x)) + values.next(), "cell's channel")

def body(carry, _):
  return step(carry), None

result = cg.scan(body, jnp.float32(1), None, length=2, progress="steps")[0]
cg.barrier()
print("result", float(result))
"""
  book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for _ in range(2)])
  nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
  texts = [
    "".join(one.get("text", "") for one in cell.outputs if one.get("name") == "stdout")
    for cell in book.cells
  ]
  assert "result 3.0" in texts[0]
  assert "result 26.0" in texts[1]
  assert [text.count("tapped") for text in texts] == [2, 2]


def test_a_gate_is_renamed_while_nobody_goes_through_the_names(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  held = list[bool]()

  class Names(weakref.WeakValueDictionary[str, Any]):
    def pop(self, *args: Any) -> Any:
      held.append(registry._lock.locked())
      return super().pop(*args)

  monkeypatch.setattr(registry, "_gates", Names(registry._gates))
  gate = cg.gate(lambda x: x, out=jnp.float32(0), name="test renamed")
  registry.rename(registry.get("test renamed"), "test renamed anew")
  assert held == [True]
  assert dict(registry.operations())["test renamed anew"] is core(gate)


AT_ONCE = """
import concurrent.futures, itertools, sys
import jax
import numpy as np
import callgate as cg

def gate(n):
  return cg.gate(lambda x: x + n, out=lambda x: x, name="defined at once")

def kernel(n):
  return cg.elementwise("float32 x", "float32 y", f"y = x + {n}", name="defined at once")

def define_and_call(make, n):
  made = make(n)
  eager = float(made(ZERO))
  program = jax.jit(lambda x: made(x))
  lowered = jax.jit(lambda x: made(2 * x)).lower(ZERO)
  return eager, float(program(ZERO)), float(program(ZERO)), float(lowered.compile()(ZERO))

ZERO = np.float32(0)
for n in range(3):
  kernel(n)  # compiles it
sys.setswitchinterval(1e-6)
with concurrent.futures.ThreadPoolExecutor(4) as threads:
  for make, numbers in ((gate, range(8)), (kernel, range(3))):
    gates = list(threads.map(make, numbers))
    assert len({gate.name for gate in gates}) == len(numbers)
    results = list(threads.map(define_and_call, itertools.repeat(make), numbers))
    assert results == [(n, n, n, n) for n in numbers], results
"""


def test_threads_of_a_script_that_define_a_gate_at_once_call_their_own() -> None:
  assert output_of(AT_ONCE) == ""


TAKEN = """
import callgate as cg

def build():
  return cg.gate(lambda x: x, out=lambda x: x, name="score")

one = build()
try:
  build()
except ValueError:
  print(one.name)
"""


def test_a_function_of_a_script_does_not_redefine_and_one_of_a_prompt_does(
  tmp_path: pathlib.Path,
) -> None:
  script = tmp_path / "script.py"
  script.write_text(TAKEN)
  assert output_of(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')") == (
    "score\n"
  )
  assert output_of(TAKEN + "\nprint(one.name)") == "score#1\n"


LEFT = """
import callgate as cg

def made(**options):
  return cg.gate(lambda x: x, out=lambda x: x, name="left", **options)

gate = made()
try:
  made(style="none")
except cg.GateDefinitionError:
  print(gate.name)
"""


def test_a_definition_that_is_refused_leaves_the_one_before() -> None:
  assert output_of(LEFT) == "left\n"
