// ArrayViews as NumPy arrays over the same memory, and NumPy arrays back into XLA's memory.
//
// An input's array is read-only, and stays so: its base is an object without a buffer, so NumPy
// finds nobody to ask for write access. Arrays derived from a view keep the view alive, which is
// how an escape shows in its reference count. The GIL is held in all of these.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "bindings/python/gil.h"
#include "core/array_view.h"
#include "core/attributes.h"

namespace callgate::bindings {

// NumPy's dtype of each code; null for those without one. Filled once at import.
std::array<PyArray_Descr*, kDTypeTableSize>& descriptors();

// NumPy's array by its address and type, whatever its strides are; nothing for other objects, and
// for a dtype that JAX doesn't have.
std::optional<ArrayView> known_view(nb::handle object);

// A new array over the view's memory. Throws for packed or unknown dtypes.
nb::object make_array(const ArrayView& view, bool writable, PyObject* base);

// As above, with the base that all views of XLA's memory share.
nb::object make_view(const ArrayView& view, bool writable);

// A new array that owns a copy of the view's memory.
nb::object make_copy(const ArrayView& view);

// Copies `value` into the view's memory once. With `cast`, same-kind casts are made; otherwise
// dtype and shape must be the view's: false where they are not.
bool store(const ArrayView& target, PyObject* value, bool cast);

// An array with masked elements, or a sequence that one is in: a mask is nothing that a result has.
bool is_masked(PyObject* value);

// What `value` is as an array, "float32[3,4]". Throws where it is none.
std::string describe(PyObject* value);

inline void* data_of(nb::handle array) {
  return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()));
}

// A dictionary of keys and values in turn.
template <typename... Items>
nb::dict dict_of(const Items&... items) {
  nb::dict made;
  auto add = [&made](auto&& again, const char* key, const auto& value, const auto&... rest) {
    made[key] = value;
    if constexpr (sizeof...(rest) != 0) again(again, rest...);
  };
  add(add, items...);
  return made;
}

inline nb::tuple tuple_of(std::span<const std::int64_t> numbers) {
  nb::list list;
  for (std::int64_t number : numbers) list.append(number);
  return nb::tuple(list);
}

// What Python hands to the runtime itself, outside of any program.

// A contiguous array, borrowed. Throws Error for anything else; `what` is expected to be one.
ArrayView view_of(nb::handle object, const char* what);

// Strings, dictionaries of these, and arrays: of rank 0 numbers, of rank 1 arrays of numbers.
Attributes attributes_of(const nb::dict& values);

}  // namespace callgate::bindings
