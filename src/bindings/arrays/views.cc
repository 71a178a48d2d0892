// SPDX-License-Identifier: Apache-2.0
// Arrays and attributes that come from Python.
#include "bindings/arrays/views.h"

namespace callgate::bindings {

nb::tuple tuple_of(std::span<const std::int64_t> numbers) {
  nb::list list;
  for (std::int64_t number : numbers) list.append(number);
  return nb::tuple(list);
}

ArrayView view_of(nb::handle object, const char* what) {
  auto* array = as_array(object);
  if (!PyArray_Check(object.ptr()) || !PyArray_IS_C_CONTIGUOUS(array))
    throw Error(what, "a contiguous NumPy array", nb::type_name(object.type()).c_str());
  if (auto view = known_view(object)) return *view;
  throw Error(what, "a dtype of JAX", "another");
}

Attributes attributes_of(const nb::dict& values) {
  Attributes attributes;
  for (auto [key, value] : values) {
    auto name = nb::cast<std::string>(key);
    if (nb::isinstance<nb::str>(value)) {
      attributes.add_string(name, nb::cast<std::string>(value));
    } else if (nb::isinstance<nb::dict>(value)) {
      attributes.add_dictionary(name, attributes_of(nb::borrow<nb::dict>(value)));
    } else {
      // A NumPy scalar, too; the call takes its reference over.
      nb::object array = taken(PyArray_EnsureArray(value.inc_ref().ptr()));
      ArrayView view = view_of(array, "an attribute");
      if (view.rank == 0) attributes.add_number(name, view.dtype, view.data);
      if (view.rank != 0) attributes.add_numbers(name, view.dtype, view.data, view.size());
    }
  }
  return attributes;
}

}  // namespace callgate::bindings
