# SPDX-License-Identifier: Apache-2.0
"""Numba's parallel loops for kernels: without the GIL, and with exceptions.

In Numba's own code, entering a `prange` takes the GIL, and an exception in the body is set on the
thread that raised it, where it is lost. `kernel_loops()` replaces three functions of the compiler
while its lock is held. Inside, the body's first failure goes to a slot on the stack of the loop's
caller, which raises it afterwards. The slot is passed in the threading layer's unused `data`
pointer.
"""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.callconv import Status, excinfo_t
from numba.core.compiler_lock import global_compiler_lock
from numba.np.ufunc import parallel, wrappers
from numba.parfors import parfor_lowering

_I8P = ir.IntType(8).as_pointer()
_I32 = ir.IntType(32)
_EXCINFO = excinfo_t.as_pointer()
_SLOT = ir.LiteralStructType([_I32, _EXCINFO])  # the status of the first failure; 0: none
_PREFIX = ".callgate.kernel."


@contextlib.contextmanager
def kernel_loops() -> Generator[None]:
  """Compiles parallel loops in the block that take no GIL and pass exceptions on."""
  replaced = (
    (parallel, "build_gufunc_kernel", _build_loop),
    (parfor_lowering, "call_parallel_gufunc", _call_loop),
    (wrappers._GufuncWrapper, "gen_loop_body", _loop_body),
  )
  with global_compiler_lock, contextlib.ExitStack() as stack:
    for owner, name, new in replaced:
      stack.callback(setattr, owner, name, getattr(owner, name))
      setattr(owner, name, new)
    yield


_numbas_call = parfor_lowering.call_parallel_gufunc
_numbas_body = wrappers._GufuncWrapper.gen_loop_body


def _build_loop(library: Any, context: Any, info: Any, signature: Any, inner_ndim: int) -> Any:
  """Replaces build_gufunc_kernel: a function that makes the threading layer run a loop's body."""
  intp = context.get_value_type(types.intp)
  sizes = intp.as_pointer()
  body = ir.FunctionType(ir.VoidType(), [_I8P.as_pointer(), sizes, sizes, _I8P])
  made = context.codegen().create_library("callgate parallel loop")
  module = made.create_ir_module("callgate.parallel.loop")
  function = ir.Function(module, body, name=f"{_PREFIX}{id(info.env)}_{info.name}")
  builder = ir.IRBuilder(function.append_basic_block("entry"))
  layer = cgutils.get_or_insert_function(
    module, ir.FunctionType(ir.VoidType(), [_I8P] * 5 + [intp] * 3), "numba_parallel_for"
  )
  threads = cgutils.get_or_insert_function(module, ir.FunctionType(intp, []), "get_num_threads")
  target = cgutils.get_or_insert_function(module, body, info.name)
  count = len(signature.args) + (not isinstance(signature.return_type, types.NoneType))
  pointers = [builder.bitcast(x, _I8P) for x in (target, *function.args)]
  builder.call(layer, [*pointers, intp(inner_ndim), intp(count), builder.call(threads, [])])
  builder.ret_void()
  made.add_linking_library(info.library)
  made.add_ir_module(module)
  made.add_linking_library(library)
  return type(info)(library=made, name=function.name, env=info.env)


def _loop_body(self: Any, builder: Any, pyapi: Any, func: Any, args: Any) -> Any:
  """Replaces _GufuncWrapper.gen_loop_body: calls the body, keeps the first failure."""
  if not self.is_parfors:
    return _numbas_body(self, builder, pyapi, func, args)
  status, _ = self.call_conv.call_function(
    builder, func, self.signature.return_type, self.signature.args, args
  )
  with builder.if_then(status.is_error, likely=False):
    slot = builder.bitcast(builder.function.args[3], _SLOT.as_pointer())
    code = builder.gep(slot, [_I32(0), _I32(0)])
    was = builder.cmpxchg(code, _I32(0), status.code, "acq_rel", "acquire")
    with builder.if_then(builder.extract_value(was, 1)):
      # The loop's end orders this write before the caller's read.
      builder.store(status.excinfoptr, builder.gep(slot, [_I32(0), _I32(1)]))
  return status.code, status.is_error


def _call_loop(lowerer: Any, *args: Any, **kwargs: Any) -> Any:
  """Replaces call_parallel_gufunc: gives the loop a slot, and raises its exception afterwards."""
  builder, convention = lowerer.builder, lowerer.context.call_conv
  slot = cgutils.alloca_once(builder, _SLOT, zfill=True, name="failure")
  builder.store(ir.Constant(_SLOT, None), slot)  # each time, for nested loops
  data = builder.bitcast(slot, _I8P)
  result = _numbas_call(lowerer, *args, **kwargs)
  call = next(
    instruction
    for block in reversed(builder.function.basic_blocks)
    for instruction in reversed(block.instructions)
    if isinstance(instruction, ir.CallInstr) and instruction.callee.name.startswith(_PREFIX)
  )
  call.operands[4] = data  # (function, args, dimensions, steps, data)
  code = builder.load(builder.gep(slot, [_I32(0), _I32(0)]))
  failed = builder.icmp_unsigned("!=", code, _I32(0))
  with builder.if_then(failed, likely=False):
    info = builder.load(builder.gep(slot, [_I32(0), _I32(1)]))
    status = Status(**dict.fromkeys(Status._fields))
    status = status._replace(code=code, is_error=failed, excinfoptr=info)
    convention.return_status_propagate(builder, status)
  return result
