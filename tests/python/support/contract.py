# SPDX-License-Identifier: Apache-2.0
"""The table of the contract: each part of callgate with a function of the host behind it.

A row makes `f(x)`, a traceable function of a float32 scalar, out of a function of the host. The
questions (tests/python/contract, a file a question) are asked of each row alike. A new part is not
done before its row is here. A row that refuses a question says so in `refuses`, with the words of
the refusal: nothing is left out in silence.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import io
import itertools
import os
import pathlib
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import worker_functions

import callgate as cg

FOLDER = pathlib.Path(__file__).parent  # from which other processes import this
F = Callable[[Any], Any]
BAD = 7.0  # the value for which a host's function raises


class Host:
  """The user's function: gives `x + plus`, notes its calls, raises for `BAD` where it is told to.

  Attributes:
    error: makes what it raises; None for nothing.
    plus: what it adds.
  """

  def __init__(self, error: Callable[[], BaseException] | None = None, plus: float = 1) -> None:
    self.error, self.plus = error, plus
    self._lock = threading.Lock()
    self._seen: list[float] = []

  def __call__(self, x: Any) -> np.ndarray:
    self.note(x)
    return np.asarray(x, np.float32) + np.float32(self.plus)

  def function(self) -> Callable[[Any], Any]:
    """The function that a part gets."""
    return lambda x: self(x)

  def consumer(self) -> Callable[[Any], None]:
    """The function that a tap gets."""
    return lambda value: self.note(value)

  def note(self, x: Any) -> None:
    values = np.asarray(x, np.float32).reshape(-1).tolist()  # several of a call with all lanes
    with self._lock:
      self._seen += values
    if self.error is not None and BAD in values:
      raise self.error()

  def seen(self) -> list[float]:
    """The values of all calls of programs that have ended, sorted."""
    jax.effects_barrier()
    with contextlib.suppress(Exception):
      cg.barrier()
    with self._lock:
      return sorted(self._seen)


@dataclasses.dataclass(frozen=True)
class Row:
  """A part in the contract.

  Attributes:
    make: makes `f`, of a host's function.
    adds: what `f(x) - x` is.
    each: True if the host's function runs once in each execution; False if JAX or the part may
      leave a call out, or make it twice.
    tells: True if an exception of the host's is the program's error; False if `cg.errors()` alone
      tells it.
    raises: the type of the program's error, where that is not the very object that the host raised.
    refuses: by question, why the part has no answer.
    around: a block in which its programs run.
    needs: a package that it needs.
    gpu: True if it runs on a CUDA device alone; the tests of the row are marked `gpu`.
  """

  make: Callable[[Host], F]
  adds: float = 1.0
  each: bool = True
  tells: bool = True
  raises: type[BaseException] | None = None
  refuses: dict[str, str] = dataclasses.field(default_factory=dict)
  around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
  needs: str = ""
  gpu: bool = False


def _gate(**options: Any) -> Callable[[Host], F]:
  return lambda host: cg.gate(host.function(), like=lambda x: x + 1, **options)


def _called(host: Host) -> F:
  return lambda x: cg.call(host.function(), x, x, effect="io")


def _into(host: Host) -> F:
  @cg.gate(out=lambda x: x, style="inplace", effect="io")
  def add(out: Any, x: Any) -> None:
    out[...] = host(x)

  return add


def _tap(**options: Any) -> Callable[[Host], F]:
  return lambda host: lambda x: cg.tap(x, host.consumer(), **options)


def _tap_kept(host: Host) -> F:
  consumer = host.consumer()  # the same one in each trace
  return lambda x: cg.tap(x, consumer)


def _check(host: Host) -> F:
  """Its predicate is what fails; no function of the user's runs."""

  def f(x: Any) -> Any:
    cg.check(x != BAD if host.error is not None else x == x, "not {x}", x=x)
    return x

  return f


def _held(host: Host) -> F:
  make = cg.hold(host.function())
  return lambda x: cg.use(_number_of, make(x), x, out=x)


def _used(host: Host) -> F:
  make = cg.hold(lambda x: (host, float(x)))
  return lambda x: cg.use(_note_held, make(x), x, out=x, effect="io")


def _number_of(made: Any, x: Any) -> Any:
  del x
  return np.float32(made)


def _note_held(made: Any, x: Any) -> Any:
  del x
  host, value = made
  return host(value)


def _started(host: Host) -> F:
  gate = _gate(effect="io")(host)
  return lambda x: gate.start(x).result()


def _thread_executor(host: Host) -> F:
  return _gate(effect="io", run_on=_executor())(host)


@functools.cache
def _executor() -> concurrent.futures.Executor:
  return concurrent.futures.ThreadPoolExecutor(2)


@functools.cache
def _thread() -> Any:
  return cg.thread("contract")


def _on_thread(host: Host) -> F:
  return _gate(effect="io", run_on=_thread())(host)


_numbers = itertools.count()


def _knob(host: Host) -> F:
  knob = cg.knob(f"contract.{next(_numbers)}", float(host.plus))
  f = lambda x: x + knob.read()
  f.keeps = knob, host  # type: ignore[attr-defined]
  return f


def _numba(host: Host) -> F:
  plus = np.float32(host.plus)
  kernel = cg.numba(lambda x, *, by: by * x + plus, out=lambda x, by: x)
  return functools.partial(kernel, by=np.float32(1))


def _elementwise(host: Host) -> F:
  return cg.elementwise("T x", "T y", f"y = x + {host.plus}")


def _torch(host: Host) -> F:
  return cg.torch(lambda x: (host.note(x.detach()), x + host.plus)[1], out=lambda x: x, effect="io")


def _feed(host: Host) -> F:
  feed = cg.feed(host(np.float32(0)) for _ in itertools.count())
  f = lambda x: x + feed.next()
  f.keeps = feed  # type: ignore[attr-defined]
  return f


def _solver(host: Host) -> F:
  solve = cg.linear_solver(
    factor=lambda a: float(a[0, 0]), solve=lambda one, b: host(b[0]).reshape(1) * np.float32(one)
  )
  return lambda x: solve(jnp.ones((1, 1)), x[None])[0]


def _root(host: Host) -> F:
  solution = cg.root(lambda x, theta: x - theta - host.plus, solver=lambda theta, x0: host(theta))
  return lambda x: solution(x, x)


def _breakpoint(host: Host) -> F:
  del host
  return lambda x: cg.breakpoint(x != x, out="x", x=x)


def _stoppable(host: Host) -> F:
  gate = _gate(effect="io")(host)
  return lambda x: cg.scan(lambda c, _: (gate(c), None), x, length=1, stoppable=True)[0]


def _until(host: Host) -> F:
  gate = _gate(effect="io")(host)

  def call(x: Any) -> Any:
    step = lambda c, _: ((gate(c[0]), c[1] + 1), None)
    return cg.scan(step, (x, 0), length=9, until=lambda c: c[1] >= 1)[0][0]

  return call


def _in_worker(host: Host) -> F:
  function = worker_functions.add if host.error is None else worker_functions.add_to_small
  return cg.gate(
    functools.partial(function, plus=host.plus),
    like=lambda x: x + 1,
    effect="io",
    run_on=_workers(),
  )


@functools.cache
def _workers() -> Any:
  return cg.workers(1)


def _path() -> pathlib.Path:
  """A path with nothing there, in a folder that pytest removes."""
  return pathlib.Path(tempfile.mkdtemp(dir=os.environ["CONTRACT_FOLDER"])) / "made"


def _envs(host: Host) -> F:
  from environments import Calling

  function = host.function()
  env = cg.envs(lambda: Calling(function))

  def f(x: Any) -> Any:
    env.reset([0])
    return env.step(x[None])[0][0]

  return f


def _saved(host: Host) -> F:
  gate, saves = _gate(effect="io")(host), cg.Checkpoints(_path(), every=1)
  return lambda x: cg.scan(lambda c, _: (gate(c), None), x, length=1, save=saves)[0]


def _with_bar(host: Host) -> F:
  gate, bar = _gate(effect="io")(host), cg.Progress("bar", file=io.StringIO())
  return lambda x: cg.fori_loop(0, 1, lambda _, c: gate(c), x, progress=bar)


def _keyed(host: Host) -> F:
  options: Any = {"like": lambda key, x: x + 1, "arrays": "jax", "effect": "io"}
  gate = cg.gate(lambda key, x: host(x) if jax.random.key_data(key).shape == (2,) else x, **options)
  return lambda x: gate(jax.random.key(0), x)


def _alerted(host: Host) -> F:
  del host
  return lambda x: (cg.alert(x > 1e9, "large: {x}", x=x), x)[1]


def _printed(host: Host) -> F:
  del host
  return lambda x: (cg.print("printed {}", x), x)[1]


def _sink(host: Host) -> F:
  name = f"contract.{next(_numbers)}"
  channel = cg.channel(name, to=[cg.sinks.JSONL(_path()), host.consumer()])
  f = lambda x: cg.tap(x, name)
  weakref.finalize(f, channel.close)
  return f


def _cpp(host: Host) -> F:
  source = "void f(cg::In<float> x, cg::Out<float> y) { y[0] = x[0] + %s; }"
  return cg.cpp(source % float(host.plus), out=lambda x: x)


_CUDA = """
__global__ void add(const float* x, float* y) { y[0] = x[0] + PLUS; }
"""


def _cuda(host: Host) -> F:
  source = _CUDA.replace("PLUS", f"{host.plus:f}f")
  return cg.cuda(source, out=lambda x: x, grid=1, block=1)


def _cpp_with_cuda(host: Host) -> F:
  source = "void add(cg::In<float> x, cg::Out<float> y) { y[0] = x[0] + PLUS; }"
  source = source.replace("PLUS", f"{host.plus:f}f")
  on_device = _CUDA.replace("PLUS", f"{host.plus:f}f")
  return cg.cpp(source, cuda_source=on_device, out=lambda x: x, grid=1, block=1)


def _numba_cuda(host: Host) -> F:
  from numba import cuda

  # Which of CUDA's libraries Numba finds is not the contract's question.
  warnings.filterwarnings("ignore", "cuda.bindings.nvjitlink", RuntimeWarning)
  plus = np.float32(host.plus)

  @cuda.jit
  def add(x: Any, y: Any) -> None:
    y[()] = x[()] + plus

  kernel = cg.numba_cuda(add, out=lambda x: x, griddim=1, blockdim=1)
  return lambda x: kernel(jnp.asarray(x))  # NumPy's numbers go by value


def _triton(host: Host) -> F:
  os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 warns
  from triton_kernels import add

  kernel = cg.triton(add, out=lambda x: x, grid=1, PLUS=host.plus)
  return lambda x: kernel(jnp.asarray(x))  # NumPy's numbers go by value


def _cfunc(host: Host) -> F:
  del host
  return cg.cfunc(ctypes.CDLL(None).fabsf, "float fabsf(float x)")


def _pure_callback(host: Host) -> F:
  from callgate.compat import callbacks

  call = functools.partial(callbacks.pure_callback, host.function(), vmap_method="sequential")
  return lambda x: call(jax.ShapeDtypeStruct((), "float32"), x)


def _io_callback(host: Host) -> F:
  from callgate.compat import callbacks

  return lambda x: callbacks.io_callback(host.function(), jax.ShapeDtypeStruct((), "float32"), x)


def _buffer_callback(host: Host) -> F:
  from callgate.compat import buffer_callback

  def add(_: Any, out: Any, x: Any) -> None:
    np.asarray(out)[...] = host(np.asarray(x))

  return buffer_callback.buffer_callback(
    add, jax.ShapeDtypeStruct((), "float32"), has_side_effect=True, vmap_method="sequential"
  )


def _id_tap(host: Host) -> F:
  from callgate.compat import host_callback

  return lambda x: host_callback.id_tap(lambda value, **_: host.note(value), x)


def _id_tap_2023(host: Host) -> F:
  from callgate.compat import host_callback_2023

  return lambda x: host_callback_2023.id_tap(lambda value, _: host.note(value), x)


def _outfeed_receiver() -> contextlib.AbstractContextManager[Any]:
  from callgate.compat import host_callback

  return host_callback.outfeed_receiver()


_CHANNELS = "this process was forked from one that had channels"
_THREADS = "this process was forked from one that ran gates on threads of their own"
_FUNCTION = "other processes don't have its function"
_OF_TAPS = {"export": _FUNCTION, "fork": _CHANNELS}
_RECENT = "callgate keeps the last 64 functions of `cg.call` and `cg.use`"
DEFINE = "Define it before the program is loaded"  # and a trace alone does
_OPEN = "an open channel keeps its consumers alive"
_NO_RULE = {"grad": "has no derivative. Define one"}
_NO_JVP = {"grad": "do not support JVP"}
_COMPILED = "only checks raise from compiled code"
_NO_FORK = {"fork": "CUDA's driver works in no fork's child"}
_OF_CUDA = {"error": _COMPILED, **_NO_RULE, **_NO_FORK}
_ON_CUDA_ALONE = {**_OF_CUDA, "engine": "the kernel has code only for platform cuda"}
_OF_TRITON = {
  **_ON_CUDA_ALONE,
  "pickle": "cannot pickle '_thread.RLock' object",
  "silence": "Triton reports objects of its own at the end of the process",
}
_JAX = "JAX reports the callback's exception in its own words"
_OF_CALLBACKS = {
  **_NO_JVP,
  "line": _JAX,
  "export": "serialization of host_callbacks",
  "equal": "outside `jit`, JAX calls the first of several equal functions",
}


def _not_under_vmap(why: str) -> dict[str, str]:
  """Refuses all questions that are asked under `vmap`."""
  of_values = ["values vmap", "values split lanes", "engine vmap"]
  return dict.fromkeys([*of_values, "error vmap", "error vmap of scan"], why)


ROWS: dict[str, Row] = {
  "gate": Row(_gate(), each=False),
  "gate io": Row(_gate(effect="io")),
  "gate ordered": Row(_gate(effect="ordered")),
  "gate whole": Row(_gate(effect="io", vmap="whole"), refuses={"lane": "one call gets all lanes"}),
  "gate inplace": Row(_into, refuses=_NO_RULE),
  "gate on its own thread": Row(_gate(effect="io", thread="own"), refuses={"fork": _THREADS}),
  "gate on a named thread": Row(_on_thread),
  "gate on an executor": Row(
    _thread_executor,
    refuses={
      "fork": "the one whose gates ran on its ThreadPoolEx",
      "pickle": "cannot pickle '_queue",
    },
  ),
  "call": Row(_called, refuses={**_NO_RULE, "dropped": _RECENT, "export elsewhere": DEFINE}),
  "tap": Row(_tap_kept, adds=0, tells=False, refuses=_OF_TAPS),
  "tap ordered": Row(_tap(ordered=True), adds=0, tells=False, refuses=_OF_TAPS),
  "tap dataflow": Row(_tap(effect="dataflow"), adds=0, tells=False, refuses=_OF_TAPS),
  "check": Row(_check, adds=0, each=False, raises=cg.CheckError),
  "hold": Row(_held, each=False, refuses={**_NO_RULE, "dropped": _RECENT}),
  "use": Row(_used, refuses={**_NO_RULE, "dropped": _RECENT}),
  "start": Row(_started, refuses={"fork": "was forked from one that ran such calls"}),
  "knob": Row(
    _knob,
    each=False,
    refuses={"error": "runs no user function", "pickle elsewhere": "define it first"},
  ),
  "feed": Row(
    _feed,
    each=False,
    refuses={
      "cycle": "the feed's thread keeps the iterator alive",
      "error": "the iterator raises before a program requests the item",
      "fork": "create the feed after the fork",
      "pickle": "its iterator runs in this process",
    },
  ),
  "linear_solver": Row(_solver, refuses={"grad": "reverse mode solves with the transposed matrix"}),
  "root": Row(_root, each=False),
  "breakpoint": Row(_breakpoint, adds=0, each=False, refuses={"error": "runs no user function"}),
  "stoppable scan": Row(
    _stoppable,
    refuses={
      "engine vmap": "JAX refuses callbacks with effects in a cond under vmap",
    },
  ),
  "scan with until": Row(
    _until, refuses={"engine vmap": "JAX refuses callbacks with effects in a cond under vmap"}
  ),
  "gate in a worker": Row(
    _in_worker,
    each=False,
    raises=LookupError,
    refuses={"fork": "this process was forked from the one that has the worker processes"},
  ),
  "envs": Row(
    _envs,
    refuses={
      "pickle": "its environments live in this process",
      "grad": "environments have no derivatives",
    },
    needs="gymnasium",
  ),
  "scan with checkpoints": Row(
    _saved,
    refuses={
      "export elsewhere": DEFINE,
      **_not_under_vmap("put the `vmap` or `shard_map` into the loop's body"),
      "values shard_map": "put the `vmap` or `shard_map` into the loop's body",
      "error vmap of cond": "put the `vmap` or `shard_map` into the loop's body",
      "values scan": "in nested loops, save the outer one",
      "interrupt": "in nested loops, save the outer one",
      "engine scan": "in nested loops, save the outer one",
      "pickle": "its thread writes for this process",
      "fork": _CHANNELS,
      "dropped": _RECENT,
    },
  ),
  "loop with a bar": Row(_with_bar),
  "gate of a key": Row(_keyed),
  "gate in a recording": Row(_gate(effect="io"), around=lambda: cg.record(_path())),
  "gate in a run": Row(_gate(effect="io"), around=lambda: cg.run("contract", folder=_path())),
  "alert": Row(
    _alerted,
    adds=0,
    each=False,
    tells=False,
    refuses={"told": "runs no user function", "fork": _CHANNELS},
  ),
  "print": Row(
    _printed,
    adds=0,
    each=False,
    tells=False,
    refuses={"told": "runs no user function", "fork": _CHANNELS},
  ),
  "channel with a sink": Row(
    _sink, adds=0, tells=False, refuses={"kept": _OPEN, "cycle": _OPEN, "fork": _CHANNELS}
  ),
  "cpp": Row(_cpp, each=False, refuses={"error": _COMPILED, **_NO_RULE}),
  "cfunc": Row(
    _cfunc,
    adds=0,
    each=False,
    refuses={
      "error": _COMPILED,
      **_NO_RULE,
      "pickle": "the C function's address belongs to this process",
    },
  ),
  "numba": Row(_numba, each=False, needs="numba", refuses={"error": _COMPILED, **_NO_RULE}),
  "elementwise": Row(_elementwise, each=False, refuses={"error": _COMPILED, **_NO_RULE}),
  "torch": Row(
    _torch, needs="torch", refuses={"grad calls": "the backward pass calls the function again"}
  ),
  "cuda": Row(_cuda, each=False, gpu=True, refuses=_ON_CUDA_ALONE),
  "cpp with CUDA": Row(_cpp_with_cuda, each=False, gpu=True, refuses=_OF_CUDA),
  "elementwise on CUDA": Row(_elementwise, each=False, gpu=True, refuses=_OF_CUDA),
  "numba_cuda": Row(_numba_cuda, each=False, gpu=True, needs="numba_cuda", refuses=_ON_CUDA_ALONE),
  "triton": Row(_triton, each=False, gpu=True, needs="triton", refuses=_OF_TRITON),
  "gate on CUDA": Row(_gate(effect="io"), gpu=True, refuses=_NO_FORK),
  "tap on CUDA": Row(_tap(), adds=0, tells=False, gpu=True, refuses={**_OF_TAPS, **_NO_FORK}),
  "pure_callback": Row(_pure_callback, each=False, refuses=_OF_CALLBACKS),
  "io_callback": Row(
    _io_callback,
    refuses={
      **_OF_CALLBACKS,
      "error vmap of cond": "JAX refuses the effect in a cond under vmap",
    },
  ),
  "buffer_callback": Row(
    _buffer_callback,
    refuses={**_NO_JVP, "lane": "JAX's rule is a loop over the lanes", "export elsewhere": DEFINE},
  ),
  "id_tap": Row(
    _id_tap,
    adds=0,
    tells=False,
    refuses={**_OF_TAPS, "grad calls": "the tap also sends the tangent"},
    around=_outfeed_receiver,
  ),
  "id_tap of 2023": Row(
    _id_tap_2023,
    adds=0,
    tells=False,
    refuses={**_OF_TAPS, "told": "the program continues; `barrier_wait()` raises"},
  ),
}

# Programs name what these make, and another process has to make it before it loads one.
DEFINED_BY_USERS = (
  *("gate", "gate io", "gate ordered", "gate whole", "gate inplace", "gate on its own thread"),
  *("gate on a named thread", "gate on an executor", "call", "hold", "use", "start", "knob"),
  *("feed", "linear_solver", "root", "stoppable scan", "scan with until", "envs"),
  *("gate in a worker", "scan with checkpoints", "loop with a bar", "gate in a recording"),
  *(
    "gate of a key",
    "gate in a run",
    "cpp",
    "cfunc",
    "numba",
    "elementwise",
    "torch",
    "buffer_callback",
    "cuda",
  ),
  *("cpp with CUDA", "elementwise on CUDA", "numba_cuda", "triton", "gate on CUDA"),
)


def installed(row: str) -> bool:
  """True if the package is here, and the device: on a GPU the rows of CUDA run, and no others."""
  needs, gpu = ROWS[row].needs, ROWS[row].gpu
  has_package = not needs or importlib.util.find_spec(needs) is not None
  return has_package and gpu == (jax.default_backend() == "gpu")


def rows(question: str) -> list[str]:
  """The rows that answer a question."""
  return [name for name, row in ROWS.items() if question not in row.refuses]


def pairs(question: str, ways: Iterable[str]) -> list[tuple[str, str]]:
  """The rows that answer a question in each way to ask it: those that neither refuse."""
  return [(row, way) for way in ways for row in rows(question) if row in rows(f"{question} {way}")]
