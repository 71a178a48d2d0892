// See the header. The GIL is held.
#include "bindings/arrays/host_arrays.h"

#include <cstdint>
#include <string>

#include "bindings/arrays/views.h"
#include "core/error.h"

namespace callgate::bindings {

ArrayView view_of(nb::handle object, const char* what) {
  auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  if (!PyArray_Check(object.ptr()) || !PyArray_IS_C_CONTIGUOUS(array)) {
    throw Error(ErrorCode::kInvalidArgument, what, "a contiguous NumPy array",
                nb::type_name(object.type()).c_str());
  }
  auto dtype = known_dtype(array);
  if (!dtype) throw Error(ErrorCode::kInvalidArgument, what, "a dtype that JAX has", "another");
  static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
  return {PyArray_DATA(array), reinterpret_cast<const std::int64_t*>(PyArray_DIMS(array)),
          PyArray_NDIM(array), *dtype};
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
      nb::object array = nb::steal(PyArray_EnsureArray(value.inc_ref().ptr()));
      if (!array.is_valid()) nb::raise_python_error();
      ArrayView view = view_of(array, "an attribute");
      if (view.rank == 0) {
        attributes.add_number(name, view.dtype, view.data);
      } else {
        attributes.add_numbers(name, view.dtype, view.data, view.size());
      }
    }
  }
  return attributes;
}

}  // namespace callgate::bindings
