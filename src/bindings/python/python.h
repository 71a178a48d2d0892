// Python, NumPy's C API and nanobind, included one way by every file of this folder; and what each
// adds to the module (channel/channel.h names its own).
//
// module.cc defines CALLGATE_IMPORT_NUMPY and owns NumPy's function table; the others share it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL callgate_numpy_api
#ifndef CALLGATE_IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

namespace callgate::bindings {
namespace nb = nanobind;

void bind_buffer(nb::module_& module);     // `Buffer`
void bind_upload(nb::module_& module);     // `Upload`: an item of a feed on its way to a GPU
void bind_gate(nb::module_& module);       // `Callee`, `Check`, `Context`
void bind_kernel(nb::module_& module);     // `Kernel`, `KernelTurn`, `CudaKernel`, `Nvrtc`
void bind_progress(nb::module_& module);   // the board of bars, for the thread that draws them
void bind_interrupt(nb::module_& module);  // Ctrl-C in Python's terms, for core/interrupt.h
// The very end of the process, after Python's: what came too late is reported, and failures that
// were found at the end make the exit status say so.
void bind_exit(nb::module_& module);

}  // namespace callgate::bindings
