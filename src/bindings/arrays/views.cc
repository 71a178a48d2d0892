// NumPy's C API: a view costs about 60 ns here, and 300 ns through the buffer or DLPack protocols.
#include "bindings/arrays/views.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "bindings/python/gil.h"
#include "core/error.h"

namespace callgate::bindings {

std::array<PyArray_Descr*, kDTypeTableSize>& descriptors() {
  static constinit std::array<PyArray_Descr*, kDTypeTableSize> table{};
  return table;
}

std::optional<ArrayView> known_view(nb::handle object) {
  if (!PyArray_Check(object.ptr())) return std::nullopt;
  auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
  for (std::size_t code = 0; code < kDTypeTableSize; ++code) {
    PyArray_Descr* known = descriptors()[code];
    if (known != nullptr && PyArray_EquivTypes(known, PyArray_DESCR(array)) != 0)
      return ArrayView{PyArray_DATA(array), PyArray_DIMS(array), PyArray_NDIM(array),
                       static_cast<DType>(code)};
  }
  return std::nullopt;
}

namespace {

// Of the view's type, over `data`, or memory of its own where that is null.
nb::object new_array(const ArrayView& view, void* data, int flags) {
  PyArray_Descr* descr = descriptors()[static_cast<std::size_t>(view.dtype)];
  if (descr == nullptr)
    raise(PyExc_TypeError,
          "callgate: NumPy has no dtype for XLA's " + std::string(name(view.dtype)));
  if (is_packed(view.dtype))
    raise(PyExc_TypeError,
          "callgate: " + std::string(name(view.dtype)) +
              " packs several elements into a byte, so it has no zero-copy view; use "
              "arrays=\"buffer\" and Buffer.unpack() / Buffer.pack()");
  Py_INCREF(reinterpret_cast<PyObject*>(descr));  // stolen below
  static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
  return taken(PyArray_NewFromDescr(&PyArray_Type, descr, view.rank, view.dims, nullptr, data,
                                    flags, nullptr));
}

// By the value's own conversion, such as __array__.
nb::object array_of(PyObject* value) {
  return taken(running_python([&] { return PyArray_FromAny(value, nullptr, 0, 0, 0, nullptr); }));
}

std::span<const std::int64_t> shape_of(PyArrayObject* array) {
  return {PyArray_DIMS(array), static_cast<std::size_t>(PyArray_NDIM(array))};
}

// Whether an array has a mask, and something is masked. No Python error is left.
bool has_mask(PyObject* array) {
  // NumPy loads it with the first masked array.
  nb::object module = nb::steal(PyImport_GetModule(nb::str("numpy.ma").ptr()));
  if (!module.is_valid()) return false;
  nb::object masked = nb::steal(
      running_python([&] { return PyObject_CallMethod(module.ptr(), "is_masked", "O", array); }));
  if (!masked.is_valid()) PyErr_Clear();
  return masked.ptr() == Py_True;
}

// Lists within more than `depth` others are no array to NumPy either; they may hold themselves.
bool is_masked(PyObject* value, int depth) {
  if (PyArray_CheckExact(value)) return false;
  if (PyArray_Check(value)) return has_mask(value);
  if (depth == 0 || (!PyList_Check(value) && !PyTuple_Check(value))) return false;
  for (Py_ssize_t i = 0; i < PySequence_Size(value); ++i) {  // __array__ of an item may shorten it
    nb::object item = nb::steal(PySequence_GetItem(value, i));
    if (item.is_valid() && is_masked(item.ptr(), depth - 1)) return true;
  }
  return false;
}

}  // namespace

bool is_masked(PyObject* value) { return is_masked(value, NPY_MAXDIMS); }

nb::object make_array(const ArrayView& view, bool writable, PyObject* base) {
  int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | (writable ? NPY_ARRAY_WRITEABLE : 0);
  // XLA may give no memory to an empty array, where NumPy would take null to mean "allocate".
  alignas(64) static char nothing[64];
  nb::object array = new_array(view, view.data != nullptr ? view.data : nothing, flags);
  if (base == nullptr) return array;
  Py_INCREF(base);  // stolen below
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), base) != 0)
    nb::raise_python_error();
  return array;
}

nb::object make_view(const ArrayView& view, bool writable) {
  // Nothing to ask for memory. One for the process.
  static PyObject* base = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  return make_array(view, writable, base);
}

nb::object make_copy(const ArrayView& view) {
  // From this size on a copy is aligned as XLA aligns: JAX then takes its memory over as it is.
  constexpr std::size_t kAlignedCopy = 1 << 16, kAlignment = 64;
  const std::size_t bytes = view.nbytes();
  if (bytes >= kAlignedCopy && !is_packed(view.dtype)) {
    void* memory =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (memory == nullptr) return taken(PyErr_NoMemory());
    nb::capsule owner(memory, [](void* owned) noexcept { std::free(owned); });
    std::memcpy(memory, view.data, bytes);
    return make_array({memory, view.dims, view.rank, view.dtype}, /*writable=*/true, owner.ptr());
  }
  nb::object array = new_array(view, /*data=*/nullptr, /*flags=*/0);
  if (bytes != 0) std::memcpy(data_of(array), view.data, bytes);
  return array;
}

bool store(const ArrayView& target, PyObject* value, bool cast) {
  nb::object converted;
  if (is_masked(value)) return false;
  if (!PyArray_Check(value)) {
    converted = array_of(value);
    value = converted.ptr();
    if (is_masked(value)) return false;  // what its __array__ gives
  }
  auto* array = reinterpret_cast<PyArrayObject*>(value);
  if (!std::ranges::equal(shape_of(array), target.shape())) return false;
  PyArray_Descr* want = descriptors()[static_cast<std::size_t>(target.dtype)];
  // By number: the byte order of a returned array is its layout, as its strides are.
  bool same = PyArray_DESCR(array) == want ||
              PyArray_EquivTypenums(PyArray_DESCR(array)->type_num, want->type_num);
  if (!same && !(cast && PyArray_CanCastTypeTo(PyArray_DESCR(array), want, NPY_SAME_KIND_CASTING)))
    return false;
  if (target.nbytes() == 0) return true;
  if (same && PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISNOTSWAPPED(array)) {
    // With an alias the callable may return the very memory that it was given.
    copy_to(target, PyArray_DATA(array));
    return true;
  }
  nb::object out = make_array(target, /*writable=*/true, nullptr);
  if (PyArray_CopyInto(reinterpret_cast<PyArrayObject*>(out.ptr()), array) != 0)
    nb::raise_python_error();
  return true;
}

std::string describe(PyObject* value) {
  nb::object array = array_of(value);
  bool masked = is_masked(value) || is_masked(array.ptr());
  std::string text = type_text(nb::cast<std::string>(nb::str(nb::object(array.attr("dtype")))),
                               shape_of(reinterpret_cast<PyArrayObject*>(array.ptr())));
  if (!masked) return text;
  // The words of _core/masked.py.
  return "a masked array (" + text +
         "), whose mask XLA's arrays don't have; give its filled(value), and its mask, "
         "if it is needed, as an array of its own";
}

ArrayView view_of(nb::handle object, const char* what) {
  auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  if (!PyArray_Check(object.ptr()) || !PyArray_IS_C_CONTIGUOUS(array))
    throw Error(what, "a contiguous NumPy array", nb::type_name(object.type()).c_str());
  if (auto view = known_view(object)) return *view;
  throw Error(what, "a dtype that JAX has", "another");
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
