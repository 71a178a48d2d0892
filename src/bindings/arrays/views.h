// SPDX-License-Identifier: Apache-2.0
// ArrayViews as NumPy arrays over the same memory. They use NumPy's C API, with which a view costs
// about 60 ns, instead of 300 ns through the buffer or DLPack protocols.
//
// An input's array stays read-only: its base is an object without a buffer, so NumPy can't grant
// write access. Arrays derived from a view keep the view alive, so an escape shows in its reference
// count. The GIL is held in all of these functions.
#pragma once

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/python/gil.h"
#include "core/array_view.h"
#include "core/attributes.h"
#include "core/error.h"

namespace callgate::bindings {

// NumPy's dtype of each code; null for codes without one. Filled once at import.
inline constinit std::array<PyArray_Descr*, kDTypeTableSize> descriptors{};
inline PyArray_Descr* descr_of(DType dtype) { return descriptors[static_cast<std::size_t>(dtype)]; }

inline PyArrayObject* as_array(nb::handle object) {
  return reinterpret_cast<PyArrayObject*>(object.ptr());
}
inline void* data_of(nb::handle array) { return PyArray_DATA(as_array(array)); }

nb::tuple tuple_of(std::span<const std::int64_t> numbers);

// Extents and strides have 64 bits in views, in NumPy and in Python; only on macOS the types
// differ.
static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
template <typename Extent>  // const or not
auto* as_numpy(Extent* extents) noexcept {
  using Theirs = std::conditional_t<std::is_const_v<Extent>, const npy_intp, npy_intp>;
  return reinterpret_cast<Theirs*>(extents);
}
inline const std::int64_t* from_numpy(const npy_intp* extents) noexcept {
  return reinterpret_cast<const std::int64_t*>(extents);
}

// A NumPy array by its address and type, for any strides; empty for other objects, and for dtypes
// that JAX lacks.
inline std::optional<ArrayView> known_view(nb::handle object) {
  if (!PyArray_Check(object.ptr())) return std::nullopt;
  auto* array = as_array(object);
  for (std::size_t code = 0; code < kDTypeTableSize; ++code) {
    PyArray_Descr* known = descriptors[code];
    if (known != nullptr && PyArray_EquivTypes(known, PyArray_DESCR(array)) != 0)
      return ArrayView{PyArray_DATA(array), from_numpy(PyArray_DIMS(array)), PyArray_NDIM(array),
                       static_cast<DType>(code)};
  }
  return std::nullopt;
}

// An array of the view's type over `data`, or over its own memory if `data` is null.
inline nb::object new_array(const ArrayView& view, void* data, int flags) {
  PyArray_Descr* descr = descr_of(view.dtype);
  if (descr == nullptr)
    raise(PyExc_TypeError,
          "callgate: NumPy has no dtype for XLA's " + std::string(name(view.dtype)));
  if (is_packed(view.dtype))
    raise(PyExc_TypeError, "callgate: " + std::string(name(view.dtype)) +
                               " has several elements in a byte, so it has no zero-copy view; use "
                               "arrays=\"buffer\" and Buffer.unpack() / Buffer.pack()");
  Py_INCREF(reinterpret_cast<PyObject*>(descr));  // stolen below
  return taken(PyArray_NewFromDescr(&PyArray_Type, descr, view.rank, as_numpy(view.dims), nullptr,
                                    data, flags, nullptr));
}

inline std::span<const std::int64_t> shape_of(PyArrayObject* array) {
  return {from_numpy(PyArray_DIMS(array)), static_cast<std::size_t>(PyArray_NDIM(array))};
}

// XLA may give no memory to an empty array, and null would make NumPy allocate.
alignas(64) inline char empty_memory[64];

// A new array over the view's memory. Throws for packed or unknown dtypes.
inline nb::object make_array(const ArrayView& view, bool writable, PyObject* base) {
  int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | (writable ? NPY_ARRAY_WRITEABLE : 0);
  nb::object array = new_array(view, view.data != nullptr ? view.data : empty_memory, flags);
  if (base == nullptr) return array;
  Py_INCREF(base);  // stolen below
  if (PyArray_SetBaseObject(as_array(array), base) != 0) nb::raise_python_error();
  return array;
}

// As above, with the base that all views of XLA's memory share.
inline nb::object make_view(const ArrayView& view, bool writable) {
  // Provides no buffer. One for the process.
  static PyObject* base = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  return make_array(view, writable, base);
}

// Writes a NumPy scalar of exactly the array's type, the result of NumPy's functions for arrays of
// rank 0. False for all other values.
inline bool write_scalar(void* to, PyObject* value, const PyArray_Descr* type) {
  if (Py_TYPE(value) != type->typeobj || !PyTypeNum_ISNUMBER(type->type_num)) return false;
  PyArray_ScalarAsCtype(value, to);
  return true;
}

// A view without other owners, kept for the site's next call: redirecting it is much cheaper than
// creating one.
class SpareView {
 public:
  nb::object take(const ArrayView& view, bool writable) {
    PyArrayObject* kept = as_array(array_.get());
    // The callable may have changed the array itself, by `x.shape = `, setflags() or similar.
    if (kept == nullptr || PyArray_FLAGS(kept) != flags_ ||
        PyArray_DESCR(kept) != descr_of(view.dtype) ||
        !std::ranges::equal(shape_of(kept), view.shape())) {
      nb::object made = make_view(view, writable);
      flags_ = PyArray_FLAGS(as_array(made));
      return made;
    }
    fields(kept)->data = static_cast<char*>(view.data != nullptr ? view.data : empty_memory);
    return nb::steal(array_.release());
  }
  // A view from take(). A view with a weak reference dies with its call.
  void keep(nb::object view) {
    if (fields(as_array(view))->weakreflist == nullptr) array_ = late(std::move(view));
  }

 private:
  static PyArrayObject_fields* fields(PyArrayObject* array) {
    return reinterpret_cast<PyArrayObject_fields*>(array);
  }

  LateReference array_;
  int flags_ = 0;  // at its creation
};

// The spare views of a call site, which one call at a time uses; another one makes its own.
class SpareViews : Immovable {
 public:
  class Claim : Immovable {
   public:
    Claim(SpareViews& of, std::size_t count)
        : views_(of.is_claimed_.exchange(true) ? nullptr : &of) {
      if (views_ != nullptr) views_->spares_.resize(count);
    }
    ~Claim() {
      if (views_ != nullptr) views_->is_claimed_.exchange(false);
    }

    // The one of this number, and those after it; null if another call has them.
    SpareView* at(std::size_t first) const noexcept {
      return views_ == nullptr ? nullptr : views_->spares_.data() + first;
    }

   private:
    SpareViews* const views_;
  };

 private:
  std::vector<SpareView> spares_;
  Shared<bool> is_claimed_{false};
};

// A new array that owns a copy of the view's memory.
inline nb::object make_copy(const ArrayView& view) {
  // Copies of this size or more have XLA's alignment, so JAX can use their memory zero-copy.
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

// --- Values that Python passes to the runtime, outside programs

// A contiguous array, borrowed. Throws Error for other values; `what` names the array in the
// message.
ArrayView view_of(nb::handle object, const char* what);

// Strings, dictionaries of these, and arrays: rank 0 gives numbers, rank 1 gives arrays of numbers.
Attributes attributes_of(const nb::dict& values);

}  // namespace callgate::bindings
