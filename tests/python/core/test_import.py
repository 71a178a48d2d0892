# SPDX-License-Identifier: Apache-2.0
"""The modules that `import callgate` loads, and the names that come when they are asked for."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from interpreters import output_of, printed_by, run_python

import callgate as cg


def test_a_module_that_is_imported_at_its_first_use_works() -> None:
  """As by `lazy import callgate` in Python 3.15 (PEP 810)."""
  code = """
    import importlib.util, sys
    import jax, numpy as np
    assert jax.jit(lambda x: x + 1)(1.0) == 2
    spec = importlib.util.find_spec("callgate")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    cg = sys.modules["callgate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cg)
    assert "callgate._attach" not in sys.modules

    @jax.jit
    def program(x):
      cg.tap(x, to=lambda value: seen.append(float(value)))
      return cg.gate(lambda x: x * np.float32(2), out=x)(x)

    seen = []
    print(program(np.float32(3)), cg.barrier(), seen)
  """
  assert printed_by(code, new=True).strip() == "6.0 None [3.0]"


def test_names_are_what_type_checkers_see() -> None:
  tree = ast.parse(Path(inspect.getfile(cg)).with_suffix(".pyi").read_text())
  seen = {
    alias.name: imported.module
    for imported in tree.body
    if isinstance(imported, ast.ImportFrom)
    for alias in imported.names
  }
  assert seen == {"executors": "callgate", "sinks": "callgate", **cg._names.MODULES}
  listed = next(node.value for node in tree.body if isinstance(node, ast.Assign))
  assert sorted(seen) == sorted(cg.__all__) == ast.literal_eval(listed)


def test_import_leaves_out_what_most_programs_have_no_need_of() -> None:
  code = """
    import sys
    import jax, numpy
    import callgate
    parts = ["_envs", "_kernel", "_torch", "_stream", "_replay", "_watch", "_serve", "_build"]
    parts.append("sinks")
    left_out = *(f"callgate.{part}" for part in parts), "gymnasium", "numba", "torch", "triton"
    print([name for name in sys.modules if name.startswith(left_out)])
  """
  assert output_of(code).strip() == "[]"


def callgates(code: str) -> list[str]:
  """The modules of callgate's that are imported after the code."""
  show = "import sys; print([n for n in sys.modules if n.startswith('callgate.')])"
  return ast.literal_eval(output_of(f"{code}\n{show}").splitlines()[-1])


def test_import_loads_what_other_processes_programs_need_and_no_part() -> None:
  loaded = {name.split(".")[1] for name in callgates("import callgate")}
  assert loaded == {"_attach", "_callgate", "_core", "_jax", "_names", "_part", "_runtime"}
  assert "callgate._start" in callgates("import callgate; callgate.gate")
  assert "callgate._start" in callgates("import callgate; from callgate import errors")


@pytest.mark.parametrize(
  ("use", "absent"),
  [
    ("jax.jit(cg.gate(lambda x: x, out=lambda x: x))(1.0)", {"_kernel"}),
    ("jax.jit(lambda x: cg.tap(x, [].append))(1.0)", {"_kernel", "_gate"}),
    ("cg.cpp", {"_tap.tap", "_gate"}),
  ],
)
def test_a_part_is_not_imported_before_its_own_first_use(use: str, absent: set[str]) -> None:
  loaded = callgates(f"import jax, callgate as cg; {use}")
  parts = {
    "_breakpoint",
    "_checkpoints",
    "_envs",
    "_feed",
    "_futures",
    "_nan",
    "_objects",
    "_steer",
  }
  for name in {*parts, "_steer", "_stream", "compat", "sinks"} | absent:
    assert not [one for one in loaded if f"{one}.".startswith(f"callgate.{name}.")], name


def test_a_module_that_is_imported_by_itself_works() -> None:
  code = """
    import sys
    from callgate._gate import gate  # as that of an unpickled object is
    assert "callgate._start" not in sys.modules
    import jax
    def failing(x): raise KeyError("no")
    assert jax.jit(gate.gate(lambda x: x, out=lambda x: x))(1.0) == 1
    assert "callgate._start" in sys.modules
    try:
      jax.jit(gate.gate(failing, out=lambda x: x))(1.0)
    except jax.errors.JaxRuntimeError as error:
      print('KeyError' in str(error), gate.Gate.__module__)
  """
  assert output_of(code).strip() == "True callgate"


@pytest.mark.parametrize("on", ["enable", "disable"])
def test_the_first_use_waits_for_no_collection_and_leaves_the_collector_as_it_was(on: str) -> None:
  code = f"""
    import gc
    import callgate
    gc.{on}()
    gc.callbacks.append(lambda phase, info: print(phase, info["generation"]))
    callgate._attach.load()
    gc.callbacks.clear()
    print(gc.isenabled())
  """
  *collections, enabled = output_of(code).splitlines()
  assert enabled == str(on == "enable")
  assert not [line for line in collections if line.endswith(" 2")]


def test_a_second_thread_takes_no_pause_of_the_collector_for_the_users_choice() -> None:
  code = """
    import gc, threading, time, types
    import callgate

    def isenabled():  # of which the second thread learns late
      enabled = gc.isenabled()
      time.sleep(0 if threading.current_thread() is threading.main_thread() else 3)
      return enabled

    begun = threading.Event()
    callgate._attach.gc = types.SimpleNamespace(
      isenabled=isenabled, enable=gc.enable, disable=lambda: (gc.disable(), begun.set())
    )
    second = threading.Thread(target=lambda: (begun.wait(), callgate._attach.load()))
    second.start()
    callgate._attach.load()
    second.join()
    print(gc.isenabled())
  """
  assert output_of(code).strip() == "True"


def test_threads_that_use_the_first_names_at_once() -> None:
  code = """
    import gc, importlib, sys, threading
    import callgate
    sys.setswitchinterval(1e-6)
    names = ["_core.registry", "_tap.tap", "_objects.handle", "sinks", "_gate.gate"]
    begin, failed = threading.Barrier(len(names) + 2), []

    def act(name):
      begin.wait()
      try:
        importlib.import_module(f"callgate.{name}") if name else callgate.gate(lambda x: x, out=())
      except BaseException as error:
        failed.append((name, error))

    threads = [threading.Thread(target=act, args=(name,)) for name in [*names, "", ""]]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(failed, gc.isenabled())
  """
  for _ in range(3):
    assert output_of(code).strip() == "[] True"


@pytest.mark.parametrize("first", ["import", "handler"])
def test_handlers_of_the_exit_that_are_registered_after_the_import_run_before(first: str) -> None:
  code = """
    import atexit, sys, jax
    import IMPORTED

    @atexit.register
    def handler():
      import callgate as cg
      jax.jit(lambda x: cg.tap(x, print))(1.0)

    import callgate
  """
  imported = "callgate" if first == "import" else "json"
  done = run_python(code.replace("IMPORTED", imported))
  assert done.returncode == 0
  if first == "import":
    assert (done.stdout, done.stderr) == ("1.0\n", "")
  else:
    assert done.stdout == ""
    assert "not delivered" in done.stderr or "end of the program" in done.stderr


def test_a_program_of_another_process_is_the_first_to_need_callgate(tmp_path: Path) -> None:
  write = """
    import pathlib, sys, jax, callgate as cg

    def program(x):
      cg.check(x > 0, "below")
      return jax.lax.while_loop(lambda i: (i < x) & ~cg.stop_requested(), lambda i: i + 1, 0.0)
    exported = jax.export.export(jax.jit(program), disabled_checks=cg.export_checks())(5.0)
    pathlib.Path(sys.argv[1]).write_bytes(exported.serialize())
  """
  read = """
    import pathlib, sys, jax, callgate
    exported = jax.export.deserialize(pathlib.Path(sys.argv[1]).read_bytes())
    assert "callgate._start" not in sys.modules
    print(exported.call(5.0))
  """
  path = str(tmp_path / "program")
  printed_by(write, path)
  assert printed_by(read, path).strip() == "5.0"


def test_public_names_say_that_they_are_callgates_whatever_came_first() -> None:
  code = """
    import callgate as cg
    cg.cpp
    from callgate._kernel.kernel import Kernel
    print(Kernel.__module__, cg.Kernel is Kernel)
    values = {name: getattr(cg, name) for name in cg.__all__}
    print([n for n, v in values.items() if getattr(v, "__module__", "").startswith("callgate.")])
  """
  assert output_of(code).split("\n")[:2] == ["callgate True", "[]"]


def test_public_modules_are_there_without_an_import_of_their_own() -> None:
  code = "import callgate as cg; print(cg.compat.__name__, cg.sinks.CSV, cg.executors.__name__)"
  assert output_of(code).split()[::3] == ["callgate.compat", "callgate.executors"]


def test_another_name_is_an_error() -> None:
  with pytest.raises(AttributeError, match="module 'callgate' has no attribute 'gates'"):
    cg.gates  # noqa: B018
  assert {"cpp", "gate", "sinks"} <= set(dir(cg))


def test_a_first_use_that_is_interrupted() -> None:
  code = """
    import sys
    import callgate

    class Interrupt:
      def find_spec(self, fullname, path, target=None):
        if fullname == "callgate._tap.primitive":
          sys.meta_path.remove(self)
          raise KeyboardInterrupt

    def outcome():
      try:
        return callgate.gate(lambda x: x, out=lambda x: x)(1.0)
      except BaseException as error:
        return type(error).__name__, str(error)[:40]

    sys.meta_path.insert(0, Interrupt())
    print(outcome())  # while it imports: the next use imports it
    from callgate._runtime import timeline
    start, timeline.start = timeline.start, lambda: 1 / 0
    print(outcome()[0])
    timeline.start = start
    print(outcome())
  """
  assert output_of(code).splitlines() == [
    "('KeyboardInterrupt', '')",
    "ZeroDivisionError",
    "('ImportError', 'callgate: its first use in this process ')",
  ]


def test_a_second_import_is_an_error_and_the_first_goes_on() -> None:
  code = """
    import importlib, sys
    import jax
    import callgate as cg

    gate = cg.gate

    def outcome(act):
      try:
        act()
      except ImportError as error:
        return str(error).partition(":")[0]

    def second():
      for name in [name for name in sys.modules if name.startswith("callgate")]:
        del sys.modules[name]
      importlib.import_module("callgate")

    print(outcome(lambda: importlib.reload(cg)))
    print(outcome(second))
    print(jax.jit(gate(lambda x: x, out=lambda x: x))(1.0))
  """
  assert output_of(code).split("\n")[:3] == [
    "importlib.reload(callgate)",
    "callgate is loaded in this process already",
    "1.0",
  ]


def test_parts_that_come_later_compile_no_program_again() -> None:
  """A new option of JAX's would change the keys of its caches."""
  text = output_of(
    """
    import jax, callgate as cg
    from callgate import _names, _part

    seen = []
    program = jax.jit(lambda x: seen.append(x) or x + 1)
    program(1.0)
    for name in _names.MODULES:
      try:
        getattr(cg, name)
      except ImportError:
        pass
    for name in _part.PARTS:
      _part.load(name)
    program(1.0)
    print(len(seen))
    """
  )
  assert text == "1\n"


@pytest.mark.parametrize(
  "use",
  [
    "cg.tap(x, print)",
    "cg.print('{}', x)",
    "cg.check(x == 0, 'no')",
    "cg.gate(lambda x: x, out=x)(x)",
    "cg.scan(lambda c, _: (c, None), x, length=2, progress=True)",
    "cg.scan(lambda c, _: (c, None), x, length=2, stoppable=True)",
    "jax.vmap(lambda x: cg.alert(x > 0, 'no'))(x[None])",
  ],
)
def test_a_program_whose_trace_is_the_first_use_is_traced_once(use: str) -> None:
  text = output_of(
    f"""
    import jax, callgate as cg

    traces = 0

    @jax.jit
    def program(x):
      global traces
      traces += 1
      {use}
      return x

    for _ in range(3):
      program(jax.numpy.float32(0)).block_until_ready()
    cg.barrier()
    print("traces", traces)
    """
  )
  assert text.splitlines()[-1] == "traces 1"
