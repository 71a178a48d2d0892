// Python, NumPy's C API and nanobind, included one way by every file of this folder.
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
}  // namespace callgate::bindings
