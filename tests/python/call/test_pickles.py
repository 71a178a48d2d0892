# SPDX-License-Identifier: Apache-2.0
"""Gates, kernels, torch functions, channels and feeds in pickles, copies and other processes."""

from __future__ import annotations

import copy
import importlib
import pathlib
import pickle
import sys
import textwrap
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from interpreters import output_of, run, same_path, succeed

import callgate as cg

cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")

X = jnp.array([3.0, 1.0, 2.0])
PICKLERS = pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])

# The definitions of a user's module. `local` are gates and kernels that no module holds.
MODULE = """
import callgate as cg, jax.numpy as jnp, numpy as np

@cg.gate(out=lambda x: x)
def sort(x):
  return np.sort(x)

double = cg.gate(lambda x: 2 * x, out=lambda x: x, name="mine.double")
triple = cg.elementwise("T x", "T y", "y = 3 * x", jvp="dy = 3 * dx")

class Sorter:
  @cg.gate(out=lambda x: x)
  def method(x):
    return np.sort(x)[::-1]

numbers = cg.feed(np.float32(i) for i in range(10))

def negated():
  return cg.elementwise("T x", "T y", "y = -2 * x")

def local():
  def scaled(x, *, by=3):
    return x * by
  gate = cg.gate(scaled, out=jnp.ones(3))
  @gate.defjvp
  def rule(primals, tangents, by=3):
    return gate(*primals, by=by), 10 * tangents[0]
  @gate.defvmap
  def lanes(size, batched, x, by=3):
    return jnp.zeros_like(x), batched[0]
  return gate
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Any:
  """The module, imported."""
  folder = tmp_path_factory.mktemp("mine")
  (folder / "users_own.py").write_text(MODULE)
  with pytest.MonkeyPatch.context() as patched:
    patched.syspath_prepend(folder)
    module = importlib.import_module("users_own")
    yield module
    module.numbers.close()
    del sys.modules["users_own"]


def in_new_process(source: str, held: bytes, mine: Any = None) -> str:
  """The output of a source that has `held`, in a process that can import `mine`."""
  start = f"""
    import pickle, callgate as cg, jax, jax.numpy as jnp
    held = {held!r}
  """
  more = [] if mine is None else [pathlib.Path(mine.__file__).parent]
  code = textwrap.dedent(start) + textwrap.dedent(source)
  return output_of(code, **same_path(*more))


# -- copies ----------------------------------------------------------------------------------------
def test_a_copy_of_what_a_program_calls_or_reads_is_the_thing_itself(mine: Any) -> None:
  with cg.channel("copied") as channel:
    for one in (mine.sort, mine.triple, mine.numbers, channel, mine.local()):
      assert copy.copy(one) is one
      assert copy.deepcopy({"a": [one]})["a"][0] is one


# -- the same process ------------------------------------------------------------------------------
@PICKLERS
def test_a_pickle_loads_as_the_same_object_where_it_was_made(mine: Any, pickler: Any) -> None:
  for one in (mine.sort, mine.double, mine.triple, mine.Sorter.method, mine.numbers):
    held = pickler.dumps(one)
    assert pickler.loads(held) is one
    assert len(held) < 200  # by module and name


def test_an_object_that_no_module_holds_is_itself_in_its_own_process(mine: Any) -> None:
  gate = mine.local()
  assert cloudpickle.loads(cloudpickle.dumps(gate)) is gate


# -- other processes -------------------------------------------------------------------------------
@PICKLERS
def test_another_process_finds_a_gate_by_its_module_and_name(mine: Any, pickler: Any) -> None:
  held = pickler.dumps([mine.sort, mine.triple, mine.Sorter.method])
  source = """
    sort, triple, method = pickle.loads(held)
    import users_own
    assert sort is users_own.sort and triple is users_own.triple
    assert method is users_own.Sorter.method
    print(jax.jit(lambda x: method(triple(sort(x))))(jnp.array([3.0, 1.0, 2.0])).tolist())
    users_own.numbers.close()
  """
  assert in_new_process(source, held, mine) == "[9.0, 6.0, 3.0]\n"


def test_another_process_makes_what_no_module_holds_again_once(mine: Any) -> None:
  gate = mine.local()
  source = """
    gate = pickle.loads(held)
    assert pickle.loads(held) is gate
    x = jnp.array([3.0, 1.0, 2.0])
    print(gate.name)
    print(jax.jit(lambda x: gate(x, by=2))(x).tolist())
    print(jax.jvp(gate, (x,), (x,))[1].tolist(), jax.grad(lambda x: gate(x).sum())(x).tolist())
    print(jax.vmap(gate)(jnp.stack([x, x])).tolist())
  """
  assert in_new_process(source, cloudpickle.dumps(gate)).splitlines() == [
    gate.name,
    "[6.0, 2.0, 4.0]",
    "[30.0, 10.0, 20.0] [10.0, 10.0, 10.0]",
    "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]",
  ]


def test_a_gate_that_is_made_again_takes_another_name_where_its_own_is_taken(mine: Any) -> None:
  gate = mine.local()
  source = f"""
    other = cg.gate(abs, out=lambda x: x, name={gate.name!r})
    gate = pickle.loads(held)
    assert gate.name != other.name
    assert gate(jnp.ones(3)).tolist() == [3.0, 3.0, 3.0]
  """
  in_new_process(source, cloudpickle.dumps(gate))


def test_a_kernel_is_made_again_beside_a_program_that_has_it(mine: Any) -> None:
  source = """
    kernel = pickle.loads(held)
    first = kernel.name
    program = jax.jit(kernel).lower(jnp.ones(3))
    del kernel
    kernel = pickle.loads(held)
    assert kernel.name != first
    print(kernel(jnp.ones(3)).tolist(), program.compile()(jnp.ones(3)).tolist())
  """
  held = cloudpickle.dumps(mine.negated())
  assert in_new_process(source, held) == "[-2.0, -2.0, -2.0] [-2.0, -2.0, -2.0]\n"


SCRIPT = """
  import multiprocessing, os, sys
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  @cg.gate(out=lambda x: x)
  def sort(x):
    return np.sort(x)

  @sort.defjvp
  def rule(primals, tangents):
    return sort(*primals), tangents[0]

  triple = cg.elementwise("T x", "T y", "y = 3 * x", jvp="dy = 3 * dx")

  def work(arguments):
    function, x = arguments
    return jax.jit(jax.value_and_grad(lambda x: function(x)[0]))(x)[0].item(), os.getpid()

  if __name__ == "__main__":
    given = [(sort, np.float32([3, 1])), (lambda x: triple(sort(x)), np.float32([5, 2]))]
"""


def run_script(tmp_path: pathlib.Path, how: str) -> None:
  script = tmp_path / "script.py"
  script.write_text(textwrap.dedent(SCRIPT) + textwrap.indent(textwrap.dedent(how), "  "))
  environment = {"JAX_PLATFORMS": "cpu", **same_path(tmp_path)}
  assert succeed(script, environment=environment) == "passed\n"


def test_gates_of_a_script_get_to_spawned_processes_by_name(tmp_path: pathlib.Path) -> None:
  run_script(
    tmp_path,
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
      [(least, process)] = pool.map(work, given[:1])
    assert least == 1.0 and process != os.getpid()
    print("passed")
    """,
  )


GUARDED = """
  import multiprocessing, callgate as cg

  def work(gate):
    pass

  if __name__ == "__main__":
    @cg.gate(out=lambda x: x)
    def guarded(x):
      return x

    process = multiprocessing.get_context("spawn").Process(target=work, args=(guarded,))
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_gate_under_a_script_s_guard_is_said_to_be_there(tmp_path: pathlib.Path) -> None:
  script = tmp_path / "script.py"
  script.write_text(textwrap.dedent(GUARDED))
  done = run(script, environment={"JAX_PLATFORMS": "cpu", **same_path(tmp_path)})
  assert done.stdout == "1\n"
  said = (
    "expected it as __main__.guarded, found nothing there. The script is imported here without "
  )
  assert said + "its `if __name__ == '__main__':` block: define it outside" in done.stderr


def test_gates_of_a_script_get_to_workers_of_joblib_by_value(tmp_path: pathlib.Path) -> None:
  pytest.importorskip("joblib", reason="joblib is not installed")
  run_script(
    tmp_path,
    """
    import joblib
    for _ in range(2):  # the second time they are there
      found = joblib.Parallel(n_jobs=2)(joblib.delayed(work)(one) for one in given * 2)
    assert [least for least, _ in found] == [1.0, 6.0] * 2
    assert os.getpid() not in [process for _, process in found]
    print("passed")
    """,
  )


def test_torch_functions_and_modules_are_made_again() -> None:
  torch = pytest.importorskip("torch", reason="PyTorch is not installed")
  square, linear = cg.torch(lambda x: x * x + 5), cg.torch(torch.nn.Linear(3, 1))
  source = """
    square, linear, params = pickle.loads(held)
    x = jnp.array([1.0, 2.0, 3.0])
    print(square.name, jax.grad(lambda x: square(x).sum())(x).tolist())
    print(jax.jit(linear)(params, x).tolist())
  """
  held = cloudpickle.dumps([square, linear, linear.params])
  assert in_new_process(source, held).splitlines() == [
    f"{square.name} [2.0, 4.0, 6.0]",
    str(jax.jit(linear)(linear.params, jnp.array([1.0, 2.0, 3.0])).tolist()),
  ]


# -- channels and feeds ----------------------------------------------------------------------------
def test_a_channel_is_the_one_of_its_name_where_it_is_loaded() -> None:
  with cg.channel("pickled") as channel:
    held = pickle.dumps(channel)
    assert pickle.loads(held) is channel
  with cg.channel("pickled") as later:
    assert pickle.loads(held) is later
  with pytest.raises(pickle.UnpicklingError, match=r"channel 'pickled'.*got none; open it first"):
    pickle.loads(held)


def test_a_pickle_by_name_tells_what_is_there_instead(mine: Any) -> None:
  held = pickle.dumps(mine.sort)
  kept, mine.sort = mine.sort, print
  with pytest.raises(pickle.UnpicklingError, match=r"'users_own.sort'.*found a builtin_function"):
    pickle.loads(held)
  mine.sort = kept


def test_a_module_that_cloudpickle_takes_along_has_its_gates_taken_along(mine: Any) -> None:
  cloudpickle.register_pickle_by_value(mine)
  try:
    held = cloudpickle.dumps(mine.sort)
  finally:
    cloudpickle.unregister_pickle_by_value(mine)
  assert len(held) > 200
  assert len(pickle.dumps(mine.sort)) < 200


# -- models that hold gates ------------------------------------------------------------------------
def test_models_of_equinox_hold_gates(mine: Any, tmp_path: pathlib.Path) -> None:
  equinox = pytest.importorskip("equinox", reason="equinox is not installed")

  class Model(equinox.Module):
    weight: jax.Array
    activation: Any

    def __call__(self, x: Any) -> Any:
      return self.activation(self.weight * x)

  model = Model(jnp.array([1.0, -1.0, 1.0]), mine.local())
  want = equinox.filter_jit(model)(X)
  copied = copy.deepcopy(model)
  assert copied.activation is model.activation
  equinox.tree_serialise_leaves(tmp_path / "leaves", model)
  like = Model(jnp.zeros(3), model.activation)
  loaded = equinox.tree_deserialise_leaves(tmp_path / "leaves", like)
  for one in (copied, loaded, cloudpickle.loads(cloudpickle.dumps(model))):
    assert (equinox.filter_jit(one)(X) == want).all()
  grads = equinox.filter_grad(lambda model, x: model(x).sum())(model, X)
  assert (grads.weight == 10 * X).all()


def test_models_of_flax_hold_gates(mine: Any) -> None:
  nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

  class Model(nnx.Module):
    def __init__(self) -> None:
      self.weight = nnx.Param(jnp.array([1.0, -1.0, 1.0]))
      self.activation = mine.local()

    def __call__(self, x: Any) -> Any:
      return self.activation(self.weight[...] * x)

  model = Model()
  want = nnx.jit(model.__call__.__func__)(model, X)
  graph, state = nnx.split(model)
  for one in (nnx.clone(model), copy.deepcopy(model), nnx.merge(graph, state)):
    assert one.activation is model.activation
    assert (nnx.jit(lambda model, x: model(x))(one, X) == want).all()
  graph, state = cloudpickle.loads(cloudpickle.dumps((graph, state)))
  assert (nnx.merge(graph, state)(X) == want).all()
  grads = nnx.grad(lambda model: model(X).sum())(model)
  assert (grads["weight"][...] == 10 * X).all()


def test_a_dataclass_of_static_fields_holds_gates(mine: Any) -> None:
  held = types.SimpleNamespace(gate=mine.sort, many=[mine.double])
  copied = copy.deepcopy(held)
  assert copied.gate is mine.sort
  assert copied.many[0] is mine.double
