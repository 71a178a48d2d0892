// SPDX-License-Identifier: Apache-2.0
// Copies a callable's results into XLA's memory. The GIL is held.
//
// An array of the declared type is copied once. Two other kinds are converted if all values are
// within the declared type's range: integers of another width, and Python's own numbers, which have
// no width.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/array_view.h"

namespace callgate::bindings {

// Uses the value's own conversion, such as __array__.
inline nb::object array_of(PyObject* value) {
  return taken(running_python([&] { return PyArray_FromAny(value, nullptr, 0, 0, 0, nullptr); }));
}

inline bool is_sequence(PyObject* value) { return PyTuple_Check(value) || PyList_Check(value); }

// The array of a tuple or list; null if its items have several shapes.
nb::object array_of_sequence(PyObject* value);

// True for a masked array, or a sequence that contains one, because results can't have a mask.
// Lists nested more than `depth` deep aren't arrays for NumPy either, and may contain themselves.
inline bool is_masked(PyObject* value, int depth = NPY_MAXDIMS) {
  if (PyArray_CheckExact(value)) return false;
  if (PyArray_Check(value)) {
    // NumPy loads it with the first masked array.
    nb::object module = nb::steal(PyImport_GetModule(nb::str("numpy.ma").ptr()));
    if (!module.is_valid()) return false;
    nb::object masked = nb::steal(
        running_python([&] { return PyObject_CallMethod(module.ptr(), "is_masked", "O", value); }));
    if (!masked.is_valid()) clear_error();
    return masked.ptr() == Py_True;
  }
  if (depth == 0 || !is_sequence(value)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Size(value); ++i) {  // __array__ of an item may shorten it
    nb::object item = nb::steal(PySequence_GetItem(value, i));
    if (item.is_valid() && is_masked(item.ptr(), depth - 1)) return true;
  }
  return false;
}

// True for a Python number, which has no width. NumPy's float64 and complex128 derive from Python's
// types.
inline bool is_number(PyObject* value) {
  return PyLong_Check(value) || PyFloat_CheckExact(value) || PyComplex_CheckExact(value);
}

// `value` for messages: an array's type "float32[3,4]", "a Python float 7.0", "a tuple of 2
// (float32[2,3] as one array)", or the type's name of other objects. Throws Python's errors.
std::string describe(PyObject* value);

// --- Values that the declared type may not hold

// Calls `body` with the elements of a dense array of NumPy's integers.
template <typename Body>
auto with_integers(PyArrayObject* array, Body&& body) {
  auto as = [&]<typename T>(T) {
    return body(std::span(static_cast<const T*>(PyArray_DATA(array)),
                          static_cast<std::size_t>(PyArray_SIZE(array))));
  };
  const bool is_signed = PyTypeNum_ISSIGNED(PyArray_TYPE(array));
  switch (PyArray_ITEMSIZE(array)) {
    case 1: return is_signed ? as(std::int8_t{}) : as(std::uint8_t{});
    case 2: return is_signed ? as(std::int16_t{}) : as(std::uint16_t{});
    case 4: return is_signed ? as(std::int32_t{}) : as(std::uint32_t{});
    default: return is_signed ? as(std::int64_t{}) : as(std::uint64_t{});
  }
}

// "`came`, outside of int32's range, -2147483648 to 2147483647"
std::string outside(DType dtype, const std::string& came);

// Describes the array if one of its integers doesn't fit into `target`, an array of another type.
std::optional<std::string> misfit(nb::handle array, const ArrayView& target);

// The range of numbers that round to a finite value of a floating type.
std::pair<double, double> range_of(DType dtype);

// Stores a Python number as an element of a floating type; returns its description if it is too
// large.
inline std::optional<std::string> store_number(const ArrayView& target, PyObject* value) {
  const auto [least, most] = range_of(target.dtype);  // imports, so no error may be pending
  // The stable ABI has no Py_complex.
  std::complex<double> number{PyComplex_RealAsDouble(value), PyComplex_ImagAsDouble(value)};
  auto misfits = [&](double part) { return std::isfinite(part) && (part < least || part > most); };
  const bool has_failed = PyErr_Occurred() != nullptr;
  if (has_failed && PyErr_ExceptionMatches(PyExc_OverflowError) == 0) nb::raise_python_error();
  if (has_failed || misfits(number.real()) || misfits(number.imag())) {
    PyErr_Clear();  // an integer beyond a double
    return outside(target.dtype, nb::str(nb::handle(value)).c_str());
  }
  const int type = name(target.dtype).starts_with("complex") ? NPY_CDOUBLE : NPY_DOUBLE;
  nb::object from = taken(PyArray_SimpleNewFromData(0, nullptr, type, &number));
  nb::object out = make_array(target, /*writable=*/true, nullptr);
  if (PyArray_CopyInto(as_array(out), as_array(from)) != 0) nb::raise_python_error();
  return std::nullopt;
}

// --- Storing

// Copies `value` into the view's memory once, or returns a description if it isn't an array of the
// view's shape and dtype. Converts integers to integers, and a Python number to a kind that
// includes it; with `cast`, also NumPy's casts of the same kind.
inline std::optional<std::string> store(const ArrayView& target, PyObject* value, bool cast) {
  PyArray_Descr* want = descr_of(target.dtype);
  if (target.rank == 0 && want != nullptr && write_scalar(target.data, value, want))
    return std::nullopt;
  nb::object converted;
  PyObject* given = value;
  if (is_masked(value)) return describe(value);
  if (!PyArray_Check(value)) {
    converted = is_sequence(value) ? array_of_sequence(value) : array_of(value);
    if (!converted.is_valid()) return describe(given);
    value = converted.ptr();
    if (is_masked(value)) return describe(given);  // the result of its __array__
  }
  auto* array = as_array(value);
  if (!std::ranges::equal(shape_of(array), target.shape())) return describe(given);
  // By number, because the byte order of a returned array is part of its layout, as its strides
  // are.
  const int have = PyArray_DESCR(array)->type_num;
  bool same = PyArray_DESCR(array) == want || PyArray_EquivTypenums(have, want->type_num);
  if (!same && is_number(given) && is_inexact(target.dtype) &&
      (!PyComplex_Check(given) || name(target.dtype).starts_with("complex")))
    return store_number(target, given);
  if (!same && PyTypeNum_ISINTEGER(want->type_num) &&
      (PyTypeNum_ISINTEGER(have) || PyLong_Check(given))) {
    if (have == NPY_OBJECT) return outside(target.dtype, nb::str(nb::handle(given)).c_str());
    if (have != NPY_BOOL)
      if (auto came = misfit(value, target)) return came;
  } else if (!same) {
    const bool castable =
        PyArray_CanCastTypeTo(PyArray_DESCR(array), want, NPY_SAME_KIND_CASTING) != 0;
    if (PyList_Check(given)) given = value;  // its elements have another type
    if (!castable) return describe(given);
    if (!cast) return describe(given) + "; pass cast=True to cast results";
  }
  if (target.nbytes() == 0) return std::nullopt;
  if (same && PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISNOTSWAPPED(array)) {
    // With an alias, the callable may return the memory that it was given.
    copy_to(target, PyArray_DATA(array));
    return std::nullopt;
  }
  nb::object out = make_array(target, /*writable=*/true, nullptr);
  if (PyArray_CopyInto(as_array(out), array) != 0) nb::raise_python_error();
  return std::nullopt;
}

}  // namespace callgate::bindings
