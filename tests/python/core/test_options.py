# SPDX-License-Identifier: Apache-2.0
"""Every option of every public function: what it can't be is refused by name, with what came.

The options are those of the signatures, so that a new one is tested as soon as it is there.
"""

from __future__ import annotations

import collections.abc
import contextlib
import inspect
import io
import itertools
import math
import numbers
import os
import pathlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.config import traceback_filtering

import callgate as cg

try:
  import tvm_ffi
except ImportError:
  tvm_ffi = None

X = jax.ShapeDtypeStruct((2,), np.float32)
numbered = itertools.count()


class Hostile:
  """Neither equal to anything, nor true nor false, nor text."""

  def __eq__(self, other: object) -> bool:
    raise RuntimeError("compared")

  def __bool__(self) -> bool:
    raise RuntimeError("asked for truth")

  def __repr__(self) -> str:
    return "Hostile()"

  __hash__ = object.__hash__


def function(x: Any) -> Any:
  return x


def environment() -> Any:
  import gymnasium

  return gymnasium.make("CartPole-v1")


def values() -> tuple[Any, ...]:
  return (
    None, True, False, 0, 1, -1, 3, 10**30, 1.5, 0.0, -2.5, math.nan, math.inf, -math.inf, 1e300,
    1j, "", "x", "1", "left right", "no\nline", "lone \ud800", b"x", bytearray(b"x"), (), [], [1],
    ("left",), (1.5,), [None], (1, 2), {}, {0: 0}, {0: "a"}, {"a": 1}, {1.5: 0}, set(), {"a"},
    range(3), object(), Hostile(), int, function, Ellipsis, pathlib.Path("x"), io.StringIO(),
    np.array([1, 2]), np.array(["each"]), np.array(1.5), np.int32(2), np.float64(0.5),
    np.bool_(True), np.str_("x"), jnp.ones(2), X,
  )  # fmt: skip


CPP = "void f(cg::In<float, 1> x, cg::Out<float, 1> y) {}"
CUDA = 'extern "C" __global__ void f(const float* x, float* y) {}'

# How each is called otherwise. No option holds a maker of a run's objects.
NAME = object()  # for one that nobody has yet
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
  "alert": (cg.alert, {"predicate": False, "text": "m"}),
  "assemble": (cg.assemble, {"records": []}),
  "barrier": (cg.barrier, {}),
  "breakpoint": (cg.breakpoint, {"when": False}),
  "cfunc": (cg.cfunc, {"function": 4096, "signature": "double f(double x)", "name": NAME}),
  "channel": (cg.channel, {"name": NAME}),
  "Checkpoints": (cg.Checkpoints, {"folder": "checkpoints"}),
  "check": (cg.check, {"predicate": True, "message": "m"}),
  "config": (cg.config, {}),
  "cpp": (cg.cpp, {"source": CPP, "function": "f", "out": X, "name": NAME}),
  "cuda": (
    cg.cuda,
    {"source": CUDA, "kernel": "f", "grid": 1, "block": 1, "out": X, "name": NAME},
  ),
  "elementwise": (
    cg.elementwise,
    {"in_params": "T x", "out_params": "T y", "operation": "y = x", "name": NAME},
  ),
  "envs": (cg.envs, {"make": environment, "name": NAME}),
  "feed": (cg.feed, {"iterable": (), "shape": X, "name": NAME}),
  "find_nan": (cg.find_nan, {"f": function}),
  "explain": (cg.explain, {"f": function}),
  "fori_loop": (
    cg.fori_loop,
    {"lower": 0, "upper": 1, "body_fun": lambda _, c: c, "init_val": 0},
  ),
  "gate": (cg.gate, {"fn": function, "out": X, "name": NAME}),
  "hold": (cg.hold, {"make": function, "name": NAME}),
  "knob": (cg.knob, {"name": NAME, "value": 1.0}),
  "library": (cg.library, {"path": "missing.so"}),
  "linear_solver": (cg.linear_solver, {"factor": function, "solve": function, "name": NAME}),
  "load_kernels": (cg.load_kernels, {"path": "missing"}),
  "numba": (cg.numba, {"fn": function, "out": X, "name": NAME}),
  "on_alert": (cg.on_alert, {"function": function}),
  "open_stream": (cg.open_stream, {"where": "missing"}),
  "print": (cg.print, {"fmt": "f"}),
  "progress": (cg.progress, {}),
  "record": (cg.record, {"path": "options.cgr"}),
  "replay": (cg.replay, {"path": "options.cgr"}),
  "root": (cg.root, {"residual": function, "solver": function, "name": NAME}),
  "run": (cg.run, {"name": "fuzzed"}),
  "save_kernels": (cg.save_kernels, {"path": "saved"}),
  "scan": (cg.scan, {"f": lambda c, x: (c, x), "init": 0, "length": 1}),
  "serve": (cg.serve, {}),
  "stop": (cg.stop, {}),
  "tap": (cg.tap, {"value": 1.0, "to": "fuzzed"}),
  "torch": (cg.torch, {"fn": function, "out": X, "name": NAME}),
  "trace": (cg.trace, {"path": "trace"}),
  "while_loop": (
    cg.while_loop,
    {"cond_fun": lambda c: c < 1, "body_fun": lambda c: c + 1, "init_val": 0},
  ),
  "thread": (cg.thread, {"name": NAME}),
  "workers": (cg.workers, {}),
} | {
  f"sinks.{name}": (getattr(cg.sinks, name), base)
  for name, base in {
    "CSV": {"path": "a.csv"},
    "ClearML": {"project": "fuzzed"},
    "HDF5": {"path": "a.h5"},
    "JSONL": {"path": "a.jsonl"},
    "MLflow": {"tracking_uri": "mlruns"},
    "Npy": {"path": "a.npy"},
    "Parquet": {"path": "a.parquet"},
    "Plot": {"path": "a.png"},
    "Print": {},
    "Stats": {},
    "Stream": {"destination": "a.cgs"},
    "TensorBoard": {"logdir": "logs"},
    "WandB": {"project": "fuzzed"},
    "Zarr": {"path": "a.zarr"},
  }.items()
}

# The rest of what is public: kernels of libraries that other tests have, what takes no options or
# is made by others, and errors.
if tvm_ffi is not None:
  taken = tvm_ffi.convert(lambda x, y: None)
  CALLS["kernel"] = (cg.kernel, {"function": taken, "out": X, "name": NAME})

ELSEWHERE = {
  "cupy": "test_cuda_cupy", "kernel": "test_tvm_ffi", "numba_cuda": "test_cuda_numba",
  "triton": "test_cuda_triton", "verify_all": "test_verify",
}  # fmt: skip
TAKES_ANYTHING = {"call", "use"}  # options of gate
# Arguments that are the program's own data or code: whatever JAX takes.
DATA = {"value", "predicate", "when", "init_val", "init", "xs", "lower", "upper", "f"} | {
  "body_fun", "cond_fun", "until", "description", "_split_transpose", "reverse", "length", "unroll"
}  # fmt: skip


def options() -> list[tuple[str, str]]:
  return [
    (name, parameter.name)
    for name, (callee, _) in CALLS.items()
    for parameter in inspect.signature(callee).parameters.values()
    if parameter.name not in DATA
    and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
  ]


def test_every_public_function_with_options_is_here() -> None:
  made = {"Channel", "Envs", "Feed", "Gate", "Progress", "config"}  # by functions, or as them
  for where, prefix in ((cg, ""), (cg.sinks, "sinks.")):
    for name in where.__all__:
      thing = getattr(where, name)
      known = f"{prefix}{name}" in CALLS or name in made | set(ELSEWHERE) | TAKES_ANYTHING
      if known or (inspect.isclass(thing) and (prefix == "" or issubclass(thing, Exception))):
        continue
      if name in ("Record", "Sink", "TapInfo", "columns") or inspect.ismodule(thing):
        continue
      assert not inspect.signature(thing).parameters, f"{prefix}{name} is not tested here"


# -- what an option's annotation lets through ---
def fits(value: Any, kind: Any) -> bool:
  """True if a value is what an annotation says."""
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if kind is Any:
    return True
  if kind is None or kind is type(None):
    return value is None
  if origin in (typing.Union, types.UnionType):
    return any(fits(value, one) for one in inner)
  if origin is typing.Literal:
    return isinstance(value, str) and value in inner
  if kind == str | os.PathLike[str] and value == "":
    return False  # no path
  if kind is bool:
    return isinstance(value, (bool, np.bool_))
  if kind is int:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
  if kind is float:
    number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    return number and not math.isnan(float(value))
  if kind is typing.TextIO:
    return hasattr(value, "write")
  if origin is collections.abc.Callable:
    return callable(value)
  if origin is os.PathLike:
    return isinstance(value, os.PathLike)
  if origin is np.ndarray or kind is np.ndarray:
    return isinstance(value, np.ndarray) and value.ndim == 1
  if origin is tuple:
    return isinstance(value, (tuple, list)) and all(map(fits, value, inner))
  if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
    return isinstance(value, origin) and all(
      fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items()
    )
  if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
    is_text = isinstance(value, str if inner[0] is Any else (str, bytes, bytearray))
    return isinstance(value, collections.abc.Iterable) and not is_text and _all_fit(value, inner[0])
  return isinstance(value, origin or kind)


def _all_fit(values: Any, kind: Any) -> bool:
  if isinstance(kind, typing.TypeVar) or kind is Any or isinstance(values, io.IOBase):
    return True
  try:
    return all(fits(one, kind) for one in values)
  except TypeError:  # an array of no dimensions
    return False


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
  """An empty folder, in which JAX cuts no tracebacks."""
  monkeypatch.chdir(tmp_path)
  with traceback_filtering("off"):
    yield tmp_path


TRACED = {"alert", "check", "fori_loop", "print", "scan", "tap", "while_loop"}


def call(name: str, option: str, value: Any) -> None:
  """Makes the call with one option in place, and undoes what it did."""
  callee, base = CALLS[name]
  given = {**base, option: value}
  given = {key: f"fuzzed {next(numbered)}" if v is NAME else v for key, v in given.items()}
  signature = inspect.signature(callee)
  ahead = [
    given.pop(p.name)
    for p in signature.parameters.values()
    if p.kind is p.POSITIONAL_ONLY and p.name in given
  ]
  if name in TRACED:
    jax.eval_shape(lambda: (callee(*ahead, **given), None)[1])
    return
  made = callee(*ahead, **given)
  if isinstance(made, contextlib.AbstractContextManager) and not name.startswith("sinks."):
    with made:  # pyright: ignore[reportUnknownVariableType]
      pass


NEEDS = {
  "envs": "gymnasium", "numba": "numba", "torch": "torch", "sinks.HDF5": "h5py",
  "sinks.ClearML": "clearml", "sinks.MLflow": "mlflow",
  "sinks.Parquet": "pyarrow", "sinks.Plot": "matplotlib", "sinks.TensorBoard": "tensorboardX",
  "sinks.WandB": "wandb", "sinks.Zarr": "zarr",
}  # fmt: skip


# The compiler gets the values of these options as they are, and refuses most.
OF_THE_COMPILER = ("flags", "include_dirs", "libraries", "library_dirs")


@pytest.mark.parametrize(("name", "option"), options())
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:callgate.gate. parallel=True has no effect:UserWarning")
def test_an_option_is_refused_by_name_or_is_what_it_says(
  name: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  if name in NEEDS:
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
  if name == "cpp" and option in OF_THE_COMPILER:
    monkeypatch.setenv("CXX", "false")
  callee, _ = CALLS[name]
  inner = callee.__init__ if inspect.isclass(callee) else callee
  kind = typing.get_type_hints(inner).get(option, Any)
  wrong: list[str] = []
  for value in values():
    try:
      good = fits(value, kind)
    except RuntimeError:  # the hostile one
      good = False
    try:
      call(name, option, value)
    except Exception as error:  # noqa: BLE001  # judged below, whatever it is
      text = str(error)
      named = option in text and (good or ("expected" in text and "got" in text))
      own = isinstance(error, (TypeError, ValueError)) and named
      if not own and not (good and isinstance(error, (OSError, ImportError, cg.GateError))):
        wrong.append(f"{value!r}: {type(error).__name__}: {text[:150]}")
    else:
      if not good:
        wrong.append(f"{value!r}: accepted")
  assert not wrong, "\n".join([f"{name}({option}=): {kind}", *wrong])


# -- misspelt options ---
def _misspelt(name: str) -> str:
  """A name of almost the same letters, with two of them changed round."""
  return name[:-2] + name[-1] + name[-2] if len(name) > 2 and name[-1] != name[-2] else f"{name}x"


# Others raise Python's own error; that of Python 3.13 has a hint, too.
HINTS = {"cfunc", "cpp", "cuda", "elementwise", "gate", "hold", "numba", "torch"}


@pytest.mark.parametrize(
  "name", [name for name in CALLS if name not in ("alert", "breakpoint", "check")]
)
@pytest.mark.usefixtures("folder")
def test_a_misspelt_option_is_refused_by_name(name: str) -> None:
  """`breakpoint`, `check` and `print` take values of any name."""
  if name in NEEDS:
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
  callee, base = CALLS[name]
  inner = callee.__init__ if inspect.isclass(callee) else callee
  for option, parameter in inspect.signature(inner).parameters.items():
    if parameter.kind is not parameter.KEYWORD_ONLY or option in base:
      continue
    with pytest.raises(ValueError if name == "print" else TypeError) as caught:
      call(name, wrong := _misspelt(option), None)
    assert wrong in str(caught.value)
    if name in HINTS or name.startswith("sinks."):
      assert str(caught.value) == (
        f"{name}() got an unexpected keyword argument '{wrong}'. Did you mean '{option}'?"
      )


# -- paths ---
def paths() -> list[tuple[str, str]]:
  """The options that take a path."""
  found: list[tuple[str, str]] = []
  for name, option in options():
    callee, _ = CALLS[name]
    inner = callee.__init__ if inspect.isclass(callee) else callee
    kind = typing.get_type_hints(inner).get(option, Any)
    if "PathLike" in repr(kind):
      found.append((name, option))
  return found


def test_every_option_that_names_a_file_is_a_path() -> None:
  assert {"sinks.JSONL", "sinks.Stream", "open_stream", "library", "trace"} <= dict(paths()).keys()


@pytest.mark.parametrize(("name", "option"), paths())
def test_a_path_with_a_nul_is_refused_and_nothing_is_made(
  name: str, option: str, folder: pathlib.Path
) -> None:
  if name in NEEDS:
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
  before = sorted(folder.iterdir())
  for path in ("victim\0.jsonl", pathlib.Path("victim\0.jsonl"), "\0"):
    several = option.endswith("dirs")
    with pytest.raises((TypeError, ValueError), match=f"{option}: expected .* without a NUL"):
      call(name, option, [path] if several else path)
  assert sorted(folder.iterdir()) == before


# -- what no annotation says ---
def test_a_linear_position_beyond_the_arguments_is_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"linear: expected .* 2 arguments"):
    cg.gate(lambda x, y: x, out=X, linear=99)(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize(
  ("make", "option"),
  [
    (lambda: cg.Buffer.pack(None, 1), "pack"),
    (lambda: cg.channel(f"fuzzed {next(numbered)}").flush("1"), "timeout"),
    (lambda: cg.channel(f"fuzzed {next(numbered)}").close(math.nan), "timeout"),
    (lambda: cg.feed([1.0]).close("1"), "timeout"),
    (lambda: cg.config(stall_seconds=1e12), "stall_seconds"),
    (lambda: cg.gate(function, out=X, timeout=1e300), "timeout"),
    (
      lambda: cg.channel("fuzzed", capacity=-1),
      r"capacity: expected a number of bytes, such as 65536 or '64MiB'",
    ),
    (
      lambda: cg.sinks.Print(format="{nope}"),
      "format: expected .* a field 'nope'; expected one of",
    ),
    (lambda: cg.sinks.Print(format="{value:{0}}"), "format: expected .* a field '0'"),
    (lambda: cg.sinks.Print(format="{"), "format: expected text for str.format, got '{'"),
    (lambda: cg.tap(2**40, print), "leaf 0: expected an array, got int 1099511627776, which"),
    (lambda: cg.gate(function, out=X)(2**40), "argument 'x': expected .* got int 1099511627776"),
    (lambda: cg.tap(np.ones(2, ">f4"), print), "leaf 0: .* dtype '>f4', which has the other byte"),
    (lambda: cg.gate(function, out=X)(np.ones(2, ">f4")), "argument 'x': .* dtype '>f4', which"),
    (lambda: cg.feed([np.ones(2, ">f4")]).next(), "item 0: .* dtype '>f4', which has"),
    (lambda: cg.feed([np.longdouble(1)]).next(), "item 0: expected an array or a number that JAX"),
    (lambda: cg.feed([1], shape=np.zeros((), ">i4")), "expected a numeric dtype .* got >i4"),
    (
      lambda: cg.tap(np.array(["a"]), print),
      "leaf 0: expected an array, got an array of dtype",
    ),
    (lambda: cg.tap(1.0, lambda: None), r"to: expected a function of \(value\) or of \(value, inf"),
    (lambda: cg.channel("fuzzed", to=lambda a, b, c: None), "to: expected functions of .value. or"),
    (lambda: cg.channel("fuzzed", to=cg.sinks.Stats), "to: expected a sink, got the class Stats"),
    (lambda: cg.sinks.CSV("x", columns=["a", "a"]), "columns: expected a name once, got .'a', 'a'"),
    (
      lambda: cg.check(True, "{x}", x="s"),
      "check: x: expected an array or a pytree of arrays, ",
    ),
    (lambda: cg.sinks.CSV("x", columns=3), "columns: expected a sequence of strings, such as"),
  ],
)
def test_so_is_what_methods_and_the_runtime_cannot_take(
  make: Callable[[], Any], option: str
) -> None:
  with pytest.raises((TypeError, ValueError), match=option):
    make()


def test_numpys_scalars_are_as_pythons() -> None:
  gate = cg.gate(
    function, out=lambda x: x, cast=np.bool_(True), linear=np.int32(0), timeout=np.float32(9),
    aliases={np.int64(0): np.int64(0)},
  )  # fmt: skip
  assert jax.jit(gate)(jnp.ones(2)).tolist() == [1.0, 1.0]
