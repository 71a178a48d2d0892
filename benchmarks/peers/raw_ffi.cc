// SPDX-License-Identifier: Apache-2.0
// The floor: what a call costs in XLA's typed FFI alone, and with nothing but a bare Python call.
//
// Handlers have no state. `Memcpy` copies operand 0 to result 0. `CallPython` takes the GIL and
// calls one process-wide Python callable without arguments; `bench_set_callable` sets it, under the
// GIL, and keeps a reference until the process ends. Built on demand by `raw.py` with the system
// compiler; symbols are looked up through ctypes.
#include <Python.h>

#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

PyObject* bare_callable = nullptr;

ffi::Error Noop(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

ffi::Error Memcpy(ffi::AnyBuffer operand, ffi::Result<ffi::AnyBuffer> result) {
  std::memcpy(result->untyped_data(), operand.untyped_data(), operand.size_bytes());
  return ffi::Error::Success();
}

ffi::Error CallPython(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* returned = PyObject_Vectorcall(bare_callable, nullptr, 0, nullptr);
  Py_XDECREF(returned);
  if (returned == nullptr) PyErr_Clear();
  PyGILState_Release(gil);
  return returned != nullptr ? ffi::Error::Success()
                             : ffi::Error(ffi::ErrorCode::kInternal, "the callable raised");
}

}  // namespace

extern "C" void bench_set_callable(PyObject* callable) {
  Py_INCREF(callable);
  Py_XDECREF(bare_callable);
  bare_callable = callable;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(bench_noop, Noop,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(bench_memcpy, Memcpy,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(bench_call_python, CallPython,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
