# SPDX-License-Identifier: Apache-2.0
"""Identity functions, one per way of reaching host code from a compiled program.

Each adapter takes the ShapeDtypeStruct of its one argument and returns a JAX-traceable function
that gives the argument back, by way of host code that copies it. All do the same work with the
means that their library's documentation shows; those whose name ends in `_empty` leave the work
out, and their result is garbage: they show the price of the call alone. (`_negate`: the negation.)
An adapter raises NotInstalled where its package is missing.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from benchmarks.peers import raw

Spec = jax.ShapeDtypeStruct
Function = Callable[..., Any]
Adapter = Callable[[Spec], Function]

_serial = itertools.count()


def callgate() -> ModuleType:
  """The callgate package, or NotInstalled."""
  return harness.require("callgate", "callgate")


def raw_noop(spec: Spec) -> Function:
  """A C++ FFI handler that does nothing."""
  return raw.raw_call("bench_noop", spec)


def raw_memcpy(spec: Spec) -> Function:
  """A C++ FFI handler that copies its operand."""
  return raw.raw_call("bench_memcpy", spec)


def raw_python_call(spec: Spec) -> Function:
  """A C++ FFI handler that takes the GIL and calls a Python function without arguments."""
  return raw.raw_call("bench_call_python", spec)


def callgate_inplace(spec: Spec, **options: Any) -> Function:
  """A gate that writes into XLA's result memory."""

  def copy(out: np.ndarray, x: np.ndarray) -> None:
    out[...] = x

  return callgate().gate(copy, out=lambda x: x, style="inplace", **options)


def callgate_inplace_empty(spec: Spec) -> Function:
  """An in-place gate with an empty body."""

  def nothing(out: np.ndarray, x: np.ndarray) -> None:
    pass

  return callgate().gate(nothing, out=lambda x: x, style="inplace")


def callgate_return(spec: Spec, **options: Any) -> Function:
  """A gate that returns its argument; callgate checks and copies it."""
  return callgate().gate(give_back, out=lambda x: x, style="return", **options)


def callgate_inplace_negate(spec: Spec) -> Function:
  """An in-place gate that computes into its result."""

  def negate(out: np.ndarray, x: np.ndarray) -> None:
    np.negative(x, out=out)

  return callgate().gate(negate, out=lambda x: x, style="inplace")


def callgate_return_negate(spec: Spec) -> Function:
  """A gate that returns something new (for rank 0, NumPy makes it a scalar)."""
  return callgate().gate(lambda x: -x, out=lambda x: x, style="return")


def callgate_aliased(spec: Spec) -> Function:
  """An in-place gate whose result is its argument's memory: there is nothing left to do."""

  def nothing(out: np.ndarray, x: np.ndarray) -> None:
    pass

  return callgate().gate(nothing, out=lambda x: x, style="inplace", aliases={0: 0})


def pure_callback(spec: Spec, **options: Any) -> Function:
  """`jax.pure_callback` of a function that returns its argument."""
  # The attribute is looked up at trace time: `callgate.install()` may have replaced it.
  return lambda x: jax.pure_callback(give_back, spec, x, **options)


def io_callback(spec: Spec, **options: Any) -> Function:
  """`jax.experimental.io_callback` of a function that returns its argument."""
  import jax.experimental

  return lambda x: jax.experimental.io_callback(give_back, spec, x, **options)


def buffer_callback(spec: Spec, **options: Any) -> Function:
  """`jax.experimental.buffer_callback` of a function that copies through numpy views."""
  module = harness.require("jax.experimental.buffer_callback", "jax")

  def copy(ctx: Any, out: Any, x: Any) -> None:
    np.asarray(out)[...] = np.asarray(x)

  return module.buffer_callback(copy, spec, **options)


def tvm_ffi_python(spec: Spec, **options: Any) -> Function:
  """jax-tvm-ffi: a Python function that copies through numpy views of its two tensors."""

  def copy(x: Any, out: Any) -> None:
    np.from_dlpack(out)[...] = np.from_dlpack(x)

  tvm_ffi = harness.require("tvm_ffi", "apache-tvm-ffi")
  return _tvm_ffi(spec, tvm_ffi.convert(copy), options, pass_owned_tensor=True)


def tvm_ffi_python_empty(spec: Spec) -> Function:
  """jax-tvm-ffi: a Python function with an empty body."""

  def nothing(x: Any, out: Any) -> None:
    pass

  tvm_ffi = harness.require("tvm_ffi", "apache-tvm-ffi")
  return _tvm_ffi(spec, tvm_ffi.convert(nothing), {})


def tvm_ffi_native(spec: Spec) -> Function:
  """jax-tvm-ffi: a C++ function that copies."""
  body = "std::memcpy(out.data_ptr(), x.data_ptr(), static_cast<size_t>(x.numel()) * 4);"
  return _tvm_ffi_cpp(spec, "bench_copy", body)


def tvm_ffi_native_empty(spec: Spec) -> Function:
  """jax-tvm-ffi: a C++ function with an empty body."""
  return _tvm_ffi_cpp(spec, "bench_nothing", "")


def _tvm_ffi_cpp(spec: Spec, name: str, body: str) -> Function:
  harness.require("jax_tvm_ffi", "jax-tvm-ffi")
  source = f"""
    #include <cstring>
    void call(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {{ {body} }}"""
  directory = raw.BUILD / "tvm" / name
  directory.mkdir(parents=True, exist_ok=True)
  cpp = harness.require("tvm_ffi.cpp", "apache-tvm-ffi")
  library = cpp.load_inline(
    name, cpp_sources=source, functions=["call"], build_directory=str(directory)
  )
  return _tvm_ffi(spec, library.call, {})


def warp_callable(spec: Spec) -> Function:
  """Warp's `jax_callable`: a Python function that launches a copy of a Warp array.

  Warp has no rank 0: a scalar goes as an array of one element.
  """
  warp = harness.require("warp", "warp-lang")
  warp.config.log_level = warp.LOG_ERROR
  array = warp.array(dtype=warp.float32, ndim=len(spec.shape))

  def copy(x, out):
    warp.copy(out, x)

  copy.__annotations__ = {"x": array, "out": array}
  function = warp.jax_callable(copy, num_outputs=1, graph_mode=warp.JaxCallableGraphMode.NONE)
  return lambda x: function(x)[0]


def brainevent_numba(spec: Spec) -> Function:
  """brainevent's `numba_kernel`: a Numba function that copies, reached through ctypes."""
  brainevent = harness.require("brainevent", "brainevent")
  numba = harness.require("numba", "numba")

  @numba.njit
  def copy(x, out):
    out[...] = x

  function = brainevent.numba_kernel(copy, outs=spec)
  return lambda x: jax.tree.leaves(function(x))[0]


def torch2jax(spec: Spec) -> Function:
  """rdyro's torch2jax (PyPI: wrap-torch2jax): a torch function that clones its argument."""
  harness.require("torch", "torch")
  module = harness.require("wrap_torch2jax", "wrap-torch2jax")
  with _quiet():
    return module.torch2jax(lambda x: x.clone(), spec, output_shapes=spec)


def give_back(x: Any) -> Any:
  """The identity, as a callback's body."""
  return x


def _tvm_ffi(spec: Spec, function: Any, call_options: dict[str, Any], **options: Any) -> Function:
  """Registers a `tvm_ffi.Function` with jax-tvm-ffi under a name of its own and calls it.

  A native function must not go through `tvm_ffi.convert`: that would call it by way of Python.
  """
  module = harness.require("jax_tvm_ffi", "jax-tvm-ffi")
  name = f"bench_tvm_{next(_serial)}"
  module.register_ffi_target(name, function, **options)
  return jax.ffi.ffi_call(name, spec, **call_options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps a peer's build messages out of the table; they are shown if the build fails."""
  captured = io.StringIO()
  try:
    with contextlib.redirect_stdout(captured):
      yield
  except Exception:
    print(captured.getvalue(), file=sys.stderr)
    raise
