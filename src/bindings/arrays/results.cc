// SPDX-License-Identifier: Apache-2.0
// Texts for results that don't fit, and the ranges of dtypes.
#include "bindings/arrays/results.h"

#include <array>
#include <string>
#include <string_view>

namespace callgate::bindings {
namespace {

// NumPy's or ml_dtypes' limits of a numeric type: `min`, `max` and `eps`.
nb::object limits_of(DType dtype) {
  return nb::module_::import_("ml_dtypes")
      .attr(is_inexact(dtype) ? "finfo"
                              : "iinfo")(nb::handle(reinterpret_cast<PyObject*>(descr_of(dtype))));
}

// "a tuple of 2 (float32[2,3] as one array)"
std::string describe_sequence(PyObject* value) {
  std::string text = (PyTuple_Check(value) ? "a tuple of " : "a list of ") +
                     std::to_string(PySequence_Size(value));
  nb::object array = array_of_sequence(value);
  if (!array.is_valid() || PyArray_DESCR(as_array(array))->type_num == NPY_OBJECT) return text;
  return text + " (" + describe(array.ptr()) + " as one array)";
}

}  // namespace

nb::object array_of_sequence(PyObject* value) {
  try {
    return array_of(value);
  } catch (nb::python_error& error) {
    const bool ragged = error.matches(PyExc_ValueError) &&
                        std::string_view(error.what()).find("inhomogeneous") != std::string::npos;
    if (!ragged) throw;
    return {};
  }
}

std::string outside(DType dtype, const std::string& came) {
  nb::object limits = limits_of(dtype);
  auto limit = [&](const char* name) { return nb::str(nb::object(limits.attr(name))); };
  return came + ", outside " + std::string(name(dtype)) + "'s range, " + limit("min").c_str() +
         " to " + limit("max").c_str();
}

std::string describe(PyObject* value) {
  if (is_number(value)) {
    nb::handle number = value;
    return std::string("a Python ") + nb::str(number.type().attr("__name__")).c_str() + " " +
           nb::str(number).c_str();
  }
  if (is_sequence(value) && !is_masked(value)) return describe_sequence(value);
  nb::object array = array_of(value);
  if (!PyArray_Check(value) && PyArray_DESCR(as_array(array))->type_num == NPY_OBJECT)
    return nb::str(nb::object(nb::handle(value).type().attr("__name__"))).c_str();
  bool masked = is_masked(value) || is_masked(array.ptr());
  std::string text =
      type_text(nb::str(nb::object(array.attr("dtype"))).c_str(), shape_of(as_array(array)));
  if (!masked) return text;
  // The text of _core/masked.py.
  return "a masked array (" + text +
         "), which XLA's arrays don't support; pass its filled(value), and its mask as a separate "
         "array if you need it";
}

std::optional<std::string> misfit(nb::handle array, const ArrayView& target) {
  const bool is_signed = name(target.dtype).starts_with("int");
  const auto most = ~std::uint64_t{0} >> (64 - bits(target.dtype) + (is_signed ? 1 : 0));
  const auto least = is_signed ? -static_cast<std::int64_t>(most) - 1 : std::int64_t{0};
  nb::object dense =
      taken(PyArray_FROMANY(array.ptr(), PyArray_TYPE(as_array(array)), 0, 0, NPY_ARRAY_IN_ARRAY));
  return with_integers(as_array(dense), [&](auto elements) -> std::optional<std::string> {
    auto found = std::ranges::find_if(elements, [&](auto element) {
      return std::cmp_less(element, least) || std::cmp_greater(element, most);
    });
    if (found == elements.end()) return std::nullopt;
    std::string came = std::to_string(*found);
    if (target.rank != 0) {
      nb::object place = nb::module_::import_("numpy").attr("unravel_index")(
          found - elements.begin(), tuple_of(target.shape()));
      came =
          describe(array.ptr()) + " with " + came + " at " +
          nb::str(
              nb::list(nb::object(
                  nb::module_::import_("builtins")
                      .attr("map")(nb::handle(reinterpret_cast<PyObject*>(&PyLong_Type)), place))))
              .c_str();
    }
    return outside(target.dtype, came);
  });
}

std::pair<double, double> range_of(DType dtype) {
  thread_local std::array<std::pair<double, double>, kDTypeTableSize> ranges{};  // {0, 0}: unknown
  auto& range = ranges[static_cast<std::size_t>(dtype)];
  if (range.second == 0) {
    nb::object limits = limits_of(dtype);
    auto limit = [&](const char* name) { return nb::cast<double>(nb::float_(limits.attr(name))); };
    const double half_unit = 1 + limit("eps") / 4;
    range = {limit("min") * half_unit, limit("max") * half_unit};
  }
  return range;
}

}  // namespace callgate::bindings
