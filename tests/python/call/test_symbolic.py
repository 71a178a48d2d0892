# SPDX-License-Identifier: Apache-2.0
"""Programs that `jax.export` takes with symbolic shapes, and that then serve every size.

`PROGRAMS` has each with what it computes and what it sends, as JAX and NumPy say it. They are
exported here and served by a fresh process, which gets the definitions as source text.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by
from jax import export

import callgate as cg

SIZES = (1, 5)
DEFINITIONS = textwrap.dedent("""
  import ctypes, ctypes.util, importlib.util, json, pathlib, sys
  import callgate as cg, jax, jax.numpy as jnp, numpy as np
  from jax import export

  SEEN = []

  def note(x):
    SEEN.append(x.tolist())
    return 2 * x

  def twice(out, x):
    np.multiply(x, 2, out=out)

  def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")

  same = lambda x, *_: x
  double = cg.gate(lambda x: 2 * x, out=same, name="symbolic.double")
  inplace = cg.gate(twice, out=same, style="inplace", name="symbolic.inplace")
  several = cg.gate(
    lambda x: {"sums": x.sum(1), "longer": np.concatenate([x, x[:1]]), "n": np.float32(len(x))},
    out=lambda x: {"sums": struct(x.shape[0]), "longer": struct(x.shape[0] + 1, 4), "n": struct()},
    name="symbolic.several",
  )
  total = cg.gate(
    lambda x, n: x.sum() * np.float32(n), out=lambda x, n: struct(), name="symbolic.total"
  )
  whole = cg.gate(lambda x: 2 * x, out=same, vmap="whole", name="symbolic.whole")
  added = cg.gate(lambda x, y: x + y, out=same, vmap="broadcast", name="symbolic.added")
  ruled = cg.gate(lambda x: 2 * x, out=same, name="symbolic.ruled")
  ruled.defvmap(lambda size, batched, x: (jnp.broadcast_to(2 * x, (size, 4)), True))
  io = cg.gate(note, out=same, effect="io", name="symbolic.io")
  ordered = cg.gate(note, out=same, effect="ordered", name="symbolic.ordered")
  sine = cg.gate(np.sin, like=jnp.sin, name="symbolic.sine")
  differences = cg.gate(np.sin, out=same, gradient="finite-difference", name="symbolic.differences")
  linear = cg.gate(lambda x: 2 * x, out=same, linear=True, name="symbolic.linear")
  linear.deftranspose(lambda ct, x: 2 * ct)
  in_place = cg.gate(twice, out=same, aliases={0: 0}, style="inplace", name="symbolic.aliased")

  template = cg.cpp('''
    template <class T, int N> void twice(cg::In<T, N> x, cg::Out<T, N> y) {
      for (int64_t i = 0; i < x.size(); ++i) y.data()[i] = 2 * x.data()[i];
    }''', out=same, name="symbolic.cpp")
  rows = cg.cpp('''
    void sums(cg::In<float, 2> x, cg::Out<float, 1> y) {
      for (int64_t i = 0; i < x.extent(0); ++i) {
        y[i] = 0;
        for (int64_t j = 0; j < x.extent(1); ++j) y[i] += x(i, j);
      }
    }''', out=lambda x: struct(x.shape[0]), name="symbolic.rows")
  libm = ctypes.CDLL(ctypes.util.find_library("m"))
  csine = cg.cfunc(libm.sinf, "float sinf(float x)", name="symbolic.csine")
  square = cg.elementwise("T x", "T y", "y = x * x", like=jnp.square, name="symbolic.square")
  product = cg.elementwise(
    "T x, T y", "T z", "z = x * y", like=lambda x, y: x * y, name="symbolic.product"
  )
  place = cg.elementwise("T x", "T y", "y = x + i", name="symbolic.place")

  def sent(x, name="symbolic", **how):
    return cg.tap(x, name, **how)

  def gradient(f):
    return jax.grad(lambda x: (f(x) * jnp.arange(4.0)).sum())

  # Each has the program, the function that it computes, and the values that calls and records see,
  # if they do.
  PROGRAMS = {
    "gate": (double, lambda x: 2 * x),
    "gate, in place": (inplace, lambda x: 2 * x),
    "gate, aliased": (lambda x: in_place(x + 1), lambda x: 2 * x + 2),
    "gate, several results": (several, lambda x: {
      "sums": x.sum(1), "longer": jnp.concatenate([x, x[:1]]), "n": jnp.float32(x.shape[0])
    }),
    "gate, of a dimension": (lambda x: total(x, x.shape[0]), lambda x: x.sum() * x.shape[0]),
    "gate, vmap": (jax.vmap(double), lambda x: 2 * x),
    "gate, vmap twice": (jax.vmap(jax.vmap(double), 1, 1), lambda x: 2 * x),
    "gate, vmap of some": (
      lambda x: jax.vmap(lambda n: jax.vmap(total, (0, None))(x, n))(jnp.arange(2.0)),
      lambda x: jnp.stack([0 * x.sum(1), x.sum(1)]),
    ),
    "gate, whole": (jax.vmap(jax.vmap(whole)), lambda x: 2 * x),
    "gate, broadcast": (lambda x: jax.vmap(added, (0, None))(x, jnp.ones(4)), lambda x: x + 1),
    "gate, a rule": (jax.vmap(ruled), lambda x: 2 * x),
    "gate, scan": (
      lambda x: jax.lax.scan(lambda c, row: (double(c) + row, double(row)), jnp.zeros(4), x)[1],
      lambda x: 2 * x,
    ),
    "gate, gradient by like": (gradient(sine), gradient(jnp.sin)),
    "gate, gradient under vmap": (gradient(jax.vmap(sine)), gradient(jnp.sin)),
    "gate, gradient by differences": (gradient(differences), gradient(jnp.sin)),
    "gate, gradient of a linear one": (gradient(jax.vmap(linear)), gradient(lambda x: 2 * x)),
    "io": (io, lambda x: 2 * x, lambda x: [x]),
    "ordered": (lambda x: ordered(ordered(x)), lambda x: 4 * x, lambda x: [x, 2 * x]),
    "ordered, unused": (lambda x: (ordered(x), x + 1)[1], lambda x: x + 1, lambda x: [x]),
    "ordered, vmap": (jax.vmap(ordered), lambda x: 2 * x, list),
    "ordered, scan": (lambda x: jax.lax.map(ordered, x), lambda x: 2 * x, list),
    "ordered, lanes apart": (
      jax.vmap(lambda row: jax.lax.cond(row[0] > 3, ordered, lambda row: row, row)),
      lambda x: jnp.where(x[:, :1] > 3, 2 * x, x), lambda x: [row for row in x if row[0] > 3],
    ),
    "cpp": (template, lambda x: 2 * x),
    "cpp, vmap": (jax.vmap(template), lambda x: 2 * x),
    "cpp, another shape": (rows, lambda x: x.sum(1)),
    "cpp, vmap of the rows": (
      lambda x: jax.vmap(rows)(jnp.stack([x, 2 * x])), lambda x: jnp.stack([x.sum(1), 2 * x.sum(1)])
    ),
    "cfunc": (csine, jnp.sin),
    "cfunc, vmap": (jax.vmap(csine), jnp.sin),
    "elementwise": (square, lambda x: x * x),
    "elementwise, vmap": (jax.vmap(square), lambda x: x * x),
    "elementwise, broadcast": (lambda x: product(x, x[:1]), lambda x: x * x[:1]),
    # Which axis is the innermost of more than one element depends on the size.
    "elementwise, open rows": (lambda x: product(x.T, x[:, 0]), lambda x: x.T * x[:, 0]),
    "elementwise, open rows of one": (
      lambda x: product(x.T, jnp.arange(4.0)[:, None]), lambda x: x.T * jnp.arange(4.0)[:, None]
    ),
    "elementwise, open rows of a scalar": (lambda x: product(x.T, 3.0), lambda x: 3 * x.T),
    "elementwise, gradient": (
      jax.grad(lambda x: product(x.T, x[:, 0]).sum()), jax.grad(lambda x: (x.T * x[:, 0]).sum())
    ),
    "elementwise, place": (place, lambda x: x + jnp.arange(x.size).reshape(x.shape)),
    "tap": (sent, lambda x: x, lambda x: [x]),
    "tap, in the flow of data": (
      lambda x: sent(x, effect="dataflow") + 1, lambda x: x + 1, lambda x: [x]
    ),
    "tap, ordered": (
      lambda x: sent(ordered(sent(x, ordered=True)), ordered=True),
      lambda x: 2 * x, lambda x: [x, x, 2 * x]
    ),
    "tap, vmap": (jax.vmap(sent), lambda x: x, list),
    "tap, vmap twice": (
      jax.vmap(jax.vmap(sent), 1, 1), lambda x: x, lambda x: list(x.T.reshape(-1))
    ),
    "tap, where": (
      jax.vmap(lambda row: sent(row, where=row[0] > 3)), lambda x: x,
      lambda x: [row for row in x if row[0] > 3],
    ),
    "tap, padded": (
      lambda x: sent(x, logical_shape=(x.shape[0] - 1, jnp.int32(2))), lambda x: x,
      lambda x: [x[:-1, :2]],
    ),
    "tap, cotangent": (
      jax.grad(lambda x: jax.vmap(lambda row: sent(row, roles=("primal", "cotangent")))(x).sum()),
      jnp.ones_like, lambda x: [*x, *jnp.ones_like(x)],
    ),
    "check": (
      lambda x: (cg.check((x >= 0).all(), "expected {n}, {x}", n=x.shape[0], x=x), x)[1],
      lambda x: x,
    ),
    "check, vmap": (
      jax.vmap(lambda row: (cg.check(row[0] >= 0, "expected {row}", row=row), row)[1]),
      lambda x: x,
    ),
    "progress": (
      lambda x: cg.scan(lambda c, row: (c + row, double(row)), jnp.zeros(4), x, progress="x")[1],
      lambda x: 2 * x,
    ),
  }

  if importlib.util.find_spec("numba"):
    @cg.numba(out=same, name="symbolic.numba")
    def doubled(out, x):
      for i in range(x.shape[0]):
        for j in range(x.shape[1]):
          out[i, j] = 2 * x[i, j]

    PROGRAMS |= {
      "numba": (doubled, lambda x: 2 * x),
      "numba, vmap": (jax.vmap(lambda row: doubled(row[None])[0]), lambda x: 2 * x),
    }

  def exported(name):
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), "float32")
    return export.export(jax.jit(PROGRAMS[name][0]), disabled_checks=cg.export_checks())(shape)

  def array(size):
    return jnp.arange(size * 4.0).reshape(size, 4)

  def served(program, size):
    # A program's results for a size, and the values that calls and consumers see: as lists.
    SEEN.clear()
    with cg.channel("symbolic", to=lambda value: SEEN.append(value.tolist())):
      results = program.call(array(size))
      cg.barrier()
    return jax.tree.map(lambda x: x.tolist(), results), list(SEEN)
""")
SERVE = """
for name in PROGRAMS:
  program = export.deserialize(bytearray(pathlib.Path(sys.argv[1], name).read_bytes()))
  for size in json.loads(sys.argv[2]):
    print(json.dumps([name, size, *served(program, size)]))
"""

_here: dict[str, Any] = {"__name__": "symbolic"}
exec(DEFINITIONS, _here)
PROGRAMS: dict[str, Any] = _here["PROGRAMS"]


def expect(name: str, size: int, results: Any, seen: list[Any]) -> None:
  _, computes, *sees = PROGRAMS[name]
  x = _here["array"](size)
  want = jax.tree.map(lambda x: x.tolist(), computes(x))
  assert jax.tree.structure(results) == jax.tree.structure(want)
  for got, one in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(got, one, rtol=1e-2 if "differences" in name else 1e-5, atol=1e-6)
  assert seen == (json.loads(json.dumps([v.tolist() for v in sees[0](x)])) if sees else [])


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
  """The results of programs that this process exported and a fresh one served."""
  folder = tmp_path_factory.mktemp("symbolic")
  for name in PROGRAMS:
    (folder / name).write_bytes(_here["exported"](name).serialize())
  arguments = str(folder), json.dumps(SIZES)
  lines = printed_by(DEFINITIONS + SERVE, *arguments).splitlines()
  printed = [json.loads(line) for line in lines if line.startswith("[")]
  return {(name, size): rest for name, size, *rest in printed}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fresh_process_serves_every_size(name: str, elsewhere: Any) -> None:
  for size in SIZES:
    expect(name, size, *elsewhere[name, size])


SHAPE = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32)


def exported(function: Any, *types: Any, vjp_order: int = 0, **how: Any) -> Any:
  """As it is loaded again, of one argument of `SHAPE` where no types are given."""
  made = export.export(jax.jit(function), disabled_checks=cg.export_checks(), **how)
  return export.deserialize(made(*(types or [SHAPE])).serialize(vjp_order=vjp_order))


@pytest.mark.parametrize("name", ["sine", "square", "differences"])
def test_exported_programs_have_the_derivatives_of_what_they_call(name: str) -> None:
  program = exported(jax.vmap(_here[name]), vjp_order=1)
  oracle = jnp.square if name == "square" else jnp.sin
  for size in SIZES:
    x = _here["array"](size)
    got, want = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (program.call, oracle))
    np.testing.assert_allclose(got, want, rtol=1e-2 if name == "differences" else 1e-5, atol=1e-3)


def test_torch_functions_serve_every_size_where_out_gives_their_results() -> None:
  torch = pytest.importorskip("torch")
  sine = cg.torch(torch.sin, out=lambda x: x, name="symbolic.torch")
  program = exported(jax.vmap(sine), vjp_order=1)
  for size in SIZES:
    x = _here["array"](size)
    np.testing.assert_allclose(program.call(x), jnp.sin(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
      jax.grad(lambda x: program.call(x).sum())(x), jnp.cos(x), rtol=1e-5, atol=1e-5
    )


def test_two_dimensions_are_told_apart() -> None:
  shape = jax.ShapeDtypeStruct(export.symbolic_shape("a, b"), jnp.float32)
  program = exported(jax.vmap(jax.vmap(_here["double"])), shape)
  for size in [(2, 5), (5, 2), (1, 1)]:
    x = jnp.arange(float(np.prod(size))).reshape(size)
    np.testing.assert_array_equal(program.call(x), 2 * x)


def test_lanes_of_records_are_those_of_the_size_served() -> None:
  lanes: list[Any] = []

  def send(x: Any) -> Any:
    return cg.tap(x, "symbolic.lanes")

  program = exported(jax.vmap(jax.vmap(send)))
  with cg.channel("symbolic.lanes", to=lambda _, info: lanes.append(info.lane)):
    for size in SIZES:
      lanes.clear()
      program.call(_here["array"](size))
      cg.barrier()
      assert lanes == list(np.ndindex(size, 4))


def test_dimensions_are_printed_as_what_they_are(capsys: Any) -> None:
  program = exported(lambda x: (cg.print("{} {n}", x.shape[0], n=2 * x.shape[0]), x)[1])
  for size in SIZES:
    program.call(_here["array"](size))
  cg.barrier()
  assert capsys.readouterr().out == "".join(f"{size} {2 * size}\n" for size in SIZES)


def test_a_failing_check_says_the_size_that_was_served() -> None:
  program = exported(
    lambda x: (cg.check((x > 0).all(), "of {n} rows: {x}", n=x.shape[0], x=x), x)[1]
  )
  with pytest.raises(cg.CheckError, match=r"of 3 rows: \[\[ 0"), cg.errors():
    jax.block_until_ready(program.call(_here["array"](3)))


def test_results_are_checked_against_the_size_that_is_served() -> None:
  lazy = cg.gate(lambda x: x[:1], out=lambda x: x, name="symbolic.lazy")
  program = exported(lazy)
  assert program.call(_here["array"](1)).shape == (1, 4)
  with pytest.raises(cg.ResultError, match=r"expected float32\[3,4\], got float32\[1,4\]"):  # noqa: SIM117
    with cg.errors():
      jax.block_until_ready(program.call(_here["array"](3)))


# -- platforms, devices --------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gate, vmap twice", "io", "ordered", "tap, vmap", "tap, padded"])
def test_one_program_for_several_platforms_serves_every_size(name: str) -> None:
  program = exported(PROGRAMS[name][0], platforms=["cpu", "cuda"])
  for size in SIZES:
    expect(name, size, *_here["served"](program, size))


def test_kernels_for_cuda_need_known_extents() -> None:
  square = cg.elementwise("T x", "T y", "y = x * x", name="symbolic.cuda", arch="sm_90")
  with pytest.raises(cg.GateDefinitionError, match=r"for CUDA .*known extents, got \(b, 4\)"):
    exported(square, platforms=["cuda"])


@pytest.fixture
def split() -> Any:
  if jax.device_count() < 4:
    pytest.skip("needs 4 devices")
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.NamedSharding(mesh, jax.P("d"))


MULTIPLE = jax.ShapeDtypeStruct(export.symbolic_shape("4*b, 4"), jnp.float32)


@pytest.mark.parametrize(
  "name", ["gate, vmap", "io", "cpp, vmap", "elementwise", "tap, vmap", "tap, padded"]
)
def test_programs_over_several_devices_serve_every_size(name: str, split: Any) -> None:
  function, computes, *_ = PROGRAMS[name]
  program = exported(jax.jit(function, in_shardings=split, out_shardings=split), MULTIPLE)
  for size in (4, 12):
    x = jax.device_put(_here["array"](size), split)
    seen: list[Any] = []
    with cg.channel("symbolic", to=lambda value, info, seen=seen: seen.append(value)):
      np.testing.assert_allclose(jax.jit(program.call)(x), computes(x))
      cg.barrier()
    assert len(seen) == {"tap, vmap": size, "tap, padded": 4}.get(name, 0)


def test_an_ordered_gate_over_several_devices_is_refused(split: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"ordered.* for one device.*or use effect='io'"):
    exported(jax.jit(_here["ordered"], in_shardings=split), MULTIPLE)


# -- what is refused -----------------------------------------------------------------------------
def test_a_dimension_is_no_static_argument() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"'n': .* got the symbolic dimension b"):
    exported(lambda x: cg.gate(lambda x, n: n * x, out=lambda x, n: x)(x, n=x.shape[0]))


def test_extents_that_are_neither_known_nor_symbolic_are_refused() -> None:
  gate = cg.gate(lambda x: x, out=lambda x: jax.ShapeDtypeStruct((1.5,), "float32"), name="half")
  with pytest.raises(cg.GateDefinitionError, match=re.escape("expected known extents, got (1.5,)")):
    gate(jnp.ones(1))
