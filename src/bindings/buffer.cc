// The protocols of Buffer: NumPy's, DLPack's and Python's buffer protocol. The GIL is held.
#include "bindings/buffer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings/dlpack.h"
#include "bindings/gil.h"
#include "bindings/views.h"
#include "core/lifecycle.h"

namespace callgate::bindings {

Buffer::Buffer(const ArrayView& view, bool readonly, std::int64_t device)
    : dims_(view.dims, view.dims + view.rank),
      strides_(dims_.size(), 1),
      byte_strides_(dims_.size()),
      view_(view),
      readonly_(readonly),
      device_(device) {
  view_.dims = dims_.data();
  for (std::size_t axis = dims_.size(); axis-- > 1;)
    strides_[axis - 1] = strides_[axis] * std::max<std::int64_t>(dims_[axis], 1);
  for (std::size_t axis = 0; axis < dims_.size(); ++axis)
    byte_strides_[axis] = strides_[axis] * bits(view_.dtype) / 8;
}

void* Buffer::detach() {
  void* before = view_.data;
  owned_ = std::make_unique<char[]>(view_.nbytes() + 1);
  if (view_.nbytes() != 0) std::memcpy(owned_.get(), before, view_.nbytes());
  view_.data = owned_.get();
  return before;
}

PyObject* make_buffer(const ArrayView& view, bool writable, std::int64_t device) {
  return nb::cast(Buffer(view, !writable, device), nb::rv_policy::move).release().ptr();
}

namespace {

std::string type_text(const Buffer& buffer) { return to_string(buffer.view()); }

void refuse_packed(const Buffer& buffer, const char* what) {
  if (!is_packed(buffer.view().dtype)) return;
  throw nb::buffer_error((std::string("Buffer.") + what + ": " + type_text(buffer) +
                          " packs several elements into a byte; use unpack() for an array with one "
                          "element a byte, pack() to write one")
                             .c_str());
}

nb::object dtype_of(const Buffer& buffer) {
  PyArray_Descr* descr = descriptors()[static_cast<std::size_t>(buffer.view().dtype)];
  if (descr == nullptr) throw nb::type_error("Buffer.dtype: NumPy has no dtype for this type");
  return nb::borrow(reinterpret_cast<PyObject*>(descr));
}

nb::object checked(PyObject* object) {
  if (object == nullptr) nb::raise_python_error();
  return nb::steal(object);
}

// NumPy's protocol: https://numpy.org/doc/stable/user/basics.interoperability.html
nb::object array(nb::handle self, nb::object dtype, nb::object copy) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  refuse_packed(buffer, "__array__");
  bool other =
      !dtype.is_none() && !nb::cast<bool>(nb::module_::import_("numpy").attr("dtype")(dtype).attr(
                              "__eq__")(dtype_of(buffer)));
  if (other && !copy.is_none() && !nb::cast<bool>(copy)) {
    throw nb::value_error("Buffer.__array__: a dtype other than the buffer's needs a copy");
  }
  if (!other && !copy.is_none() && nb::cast<bool>(copy)) return checked(make_copy(buffer.view()));
  nb::object view = checked(make_array(buffer.view(), !buffer.readonly(), self.ptr()));
  return other ? nb::object(view.attr("astype")(dtype)) : view;
}

// What an exported tensor keeps: the Buffer, or the memory of a copy.
struct Export {
  PyObject* buffer = nullptr;
  std::unique_ptr<char[]> copy;
  std::vector<std::int64_t> shape, strides;
};

template <typename Managed>
void release(Managed* managed) {
  auto* exported = static_cast<Export*>(managed->context);
  if (exported->buffer != nullptr && !Lifecycle::instance().closed()) {
    GilScope gil;  // consumers may drop their tensor on any thread
    --nb::cast<Buffer&>(nb::handle(exported->buffer)).exports;
    Py_DECREF(exported->buffer);
  }
  delete exported;
  delete managed;
}

template <typename Managed>
nb::object capsule(std::unique_ptr<Managed> managed, const char* name) {
  // A consumer that takes the tensor renames the capsule; only an unused one is released here.
  PyObject* made = PyCapsule_New(managed.get(), name, [](PyObject* self) {
    const char* unused = PyCapsule_GetName(self);
    bool versioned = std::strcmp(unused, "dltensor_versioned") == 0;
    if (!versioned && std::strcmp(unused, "dltensor") != 0) return;
    auto* tensor = static_cast<Managed*>(PyCapsule_GetPointer(self, unused));
    tensor->deleter(tensor);
  });
  if (made == nullptr) {
    managed->deleter(managed.release());
    nb::raise_python_error();
  }
  managed.release();
  return nb::steal(made);
}

template <typename Managed>
std::unique_ptr<Managed> export_tensor(nb::handle self, bool copied) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  auto type = dlpack::data_type(buffer.view().dtype);
  if (!type) {
    throw nb::buffer_error(
        ("Buffer.__dlpack__: DLPack has no type for " + type_text(buffer)).c_str());
  }
  auto exported = std::make_unique<Export>();
  auto managed = std::make_unique<Managed>();
  exported->shape = buffer.dims();
  exported->strides = buffer.strides();
  void* data = buffer.view().data;
  if (copied) {
    exported->copy = std::make_unique<char[]>(buffer.view().nbytes() + 1);
    if (buffer.view().nbytes() != 0)
      std::memcpy(exported->copy.get(), data, buffer.view().nbytes());
    data = exported->copy.get();
  } else {
    ++nb::cast<Buffer&>(self).exports;
    Py_INCREF(self.ptr());
    exported->buffer = self.ptr();
  }
  managed->tensor = {data,  {dlpack::kCpu, 0},      buffer.view().rank,
                     *type, exported->shape.data(), exported->strides.data(),
                     0};
  managed->context = exported.release();
  managed->deleter = &release<Managed>;
  return managed;
}

// https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html
nb::object dlpack_export(nb::handle self, nb::object stream, nb::object max_version,
                         nb::object dl_device, nb::object copy) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  refuse_packed(buffer, "__dlpack__");
  if (!stream.is_none() && nb::cast<std::int64_t>(stream) != -1)
    throw nb::buffer_error("Buffer.__dlpack__: stream must be None for memory of the CPU");
  if (!dl_device.is_none() &&
      nb::cast<std::pair<int, int>>(dl_device) != std::pair<int, int>(dlpack::kCpu, 0))
    throw nb::buffer_error("Buffer.__dlpack__: dl_device must be None or (1, 0), the CPU");
  bool versioned = !max_version.is_none() && nb::cast<std::pair<int, int>>(max_version).first >= 1;
  bool want_copy = !copy.is_none() && nb::cast<bool>(copy);
  bool forbid_copy = !copy.is_none() && !want_copy;
  if (versioned) {
    auto managed = export_tensor<dlpack::ManagedTensorVersioned>(self, want_copy);
    managed->major = 1;
    managed->minor = 0;
    managed->flags = want_copy ? dlpack::kCopied : buffer.readonly() ? dlpack::kReadOnly : 0;
    return capsule(std::move(managed), "dltensor_versioned");
  }
  // Version 0 can't say "read-only": its consumers get a copy of an input.
  if (buffer.readonly() && forbid_copy)
    throw nb::buffer_error(
        "Buffer.__dlpack__: an input is read-only, which DLPack can say from version 1 on; pass "
        "max_version=(1, 0), or let it copy");
  return capsule(export_tensor<dlpack::ManagedTensor>(self, want_copy || buffer.readonly()),
                 "dltensor");
}

// Zero copy also for an input and a consumer without a notion of read-only: for `arrays="torch"`,
// whose documentation says not to write.
nb::object dlpack_unchecked(nb::handle self) {
  refuse_packed(nb::cast<const Buffer&>(self), "__dlpack__");
  return capsule(export_tensor<dlpack::ManagedTensor>(self, /*copied=*/false), "dltensor");
}

// The struct-module letter of a type, for Python's buffer protocol; null where it has none.
const char* format_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kPred: return "?";
    case DType::kS8: return "b";
    case DType::kS16: return "h";
    case DType::kS32: return "i";
    case DType::kS64: return "q";
    case DType::kU8: return "B";
    case DType::kU16: return "H";
    case DType::kU32: return "I";
    case DType::kU64: return "Q";
    case DType::kF16: return "e";
    case DType::kF32: return "f";
    case DType::kF64: return "d";
    case DType::kC64: return "Zf";
    case DType::kC128: return "Zd";
    default: return nullptr;
  }
}

int get_buffer(PyObject* self, Py_buffer* out, int flags) {
  const auto& buffer = nb::cast<const Buffer&>(nb::handle(self));
  const char* format = format_of(buffer.view().dtype);
  if (format == nullptr) {
    PyErr_Format(PyExc_BufferError, "Buffer: the buffer protocol has no format for %s",
                 type_text(buffer).c_str());
    return -1;
  }
  if ((flags & PyBUF_WRITABLE) != 0 && buffer.readonly()) {
    PyErr_SetString(PyExc_BufferError, "Buffer: an input of a gate is read-only");
    return -1;
  }
  *out = {};
  out->buf = buffer.view().data;
  Py_INCREF(self);
  out->obj = self;
  out->len = static_cast<Py_ssize_t>(buffer.view().nbytes());
  out->itemsize = bits(buffer.view().dtype) / 8;
  out->readonly = buffer.readonly();
  out->ndim = buffer.view().rank;
  // The protocol's fields are not const; consumers do not write to them.
  if ((flags & PyBUF_FORMAT) != 0) out->format = const_cast<char*>(format);
  if ((flags & PyBUF_ND) != 0)
    out->shape = reinterpret_cast<Py_ssize_t*>(const_cast<std::int64_t*>(buffer.dims().data()));
  if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES)
    out->strides =
        reinterpret_cast<Py_ssize_t*>(const_cast<std::int64_t*>(buffer.byte_strides().data()));
  return 0;
}

// One element a byte, sign-extended for signed integers: the layout of ml_dtypes' int4 and friends.
nb::object unpack(nb::handle self) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  const ArrayView& view = buffer.view();
  if (!is_packed(view.dtype)) return array(self, nb::none(), nb::bool_(true));
  nb::object made = nb::steal(PyArray_SimpleNew(
      view.rank, reinterpret_cast<npy_intp*>(const_cast<std::int64_t*>(view.dims)), NPY_UINT8));
  if (!made.is_valid()) nb::raise_python_error();
  auto* out =
      static_cast<unsigned char*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(made.ptr())));
  const auto* in = static_cast<const unsigned char*>(view.data);
  int width = bits(view.dtype), per_byte = 8 / width;
  bool is_signed = name(view.dtype).starts_with("int");
  for (std::size_t i = 0; i < view.size(); ++i) {
    auto index = static_cast<std::size_t>(per_byte);
    unsigned value =
        (in[i / index] >> (static_cast<int>(i % index) * width)) & ((1u << width) - 1u);
    if (is_signed && (value >> (width - 1)) != 0) value |= 0xffu << width;
    out[i] = static_cast<unsigned char>(value);
  }
  return made.attr("view")(dtype_of(buffer));
}

void pack(nb::handle self, nb::handle values) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  const ArrayView& view = buffer.view();
  if (buffer.readonly()) throw nb::type_error("Buffer.pack: an input of a gate is read-only");
  nb::object numpy = nb::module_::import_("numpy");
  nb::object array = numpy.attr("asarray")(values, nb::arg("order") = "C");
  if (!array.attr("dtype").equal(dtype_of(buffer)) ||
      !nb::cast<bool>(numpy.attr("array_equal")(array.attr("shape"), self.attr("shape")))) {
    throw nb::type_error(("Buffer.pack: expected " + type_text(buffer) + ", got " +
                          nb::cast<std::string>(nb::str(nb::object(array.attr("dtype")))) +
                          nb::cast<std::string>(nb::str(nb::object(array.attr("shape")))))
                             .c_str());
  }
  auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
  if (!is_packed(view.dtype)) {
    if (view.nbytes() != 0) std::memcpy(view.data, PyArray_DATA(source), view.nbytes());
    return;
  }
  const auto* in = static_cast<const unsigned char*>(PyArray_DATA(source));
  auto* out = static_cast<unsigned char*>(view.data);
  int width = bits(view.dtype);
  auto per_byte = static_cast<std::size_t>(8 / width);
  if (view.nbytes() != 0) std::memset(out, 0, view.nbytes());
  for (std::size_t i = 0; i < view.size(); ++i) {
    unsigned value = (in[i] & ((1u << width) - 1u)) << (static_cast<int>(i % per_byte) * width);
    out[i / per_byte] = static_cast<unsigned char>(out[i / per_byte] | value);
  }
}

std::string repr(const Buffer& buffer) {
  return "Buffer(" + type_text(buffer) + ", device=cpu:" + std::to_string(buffer.device()) +
         (buffer.readonly() ? ", read-only)" : ")");
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
                              {0, nullptr}};

}  // namespace

void bind_buffer(nb::module_& module) {
  nb::class_<Buffer>(module, "Buffer", nb::type_slots(buffer_slots), nb::is_weak_referenceable(),
                     "An array of the running call: XLA's own memory, for the length of the call.")
      .def_prop_ro(
          "shape",
          [](const Buffer& b) {
            nb::list shape;
            for (std::int64_t extent : b.dims()) shape.append(extent);
            return nb::tuple(shape);
          },
          "Extents, outermost first; the layout is dense and row-major.")
      .def_prop_ro("dtype", &dtype_of, "The NumPy (or ml_dtypes) dtype.")
      .def_prop_ro("ndim", [](const Buffer& b) { return b.dims().size(); })
      .def_prop_ro("size", [](const Buffer& b) { return b.view().size(); })
      .def_prop_ro(
          "nbytes", [](const Buffer& b) { return b.view().nbytes(); },
          "Bytes of XLA's memory; sub-byte types count whole bytes.")
      .def_prop_ro("device", [](const Buffer& b) { return "cpu:" + std::to_string(b.device()); })
      .def_prop_ro("readonly", &Buffer::readonly, "True for inputs, False for results.")
      .def_prop_ro("writeable", [](const Buffer& b) { return !b.readonly(); })
      .def("__array__", &array, nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def("__dlpack__", &dlpack_export, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none())
      .def("__dlpack_device__", [](const Buffer&) { return std::pair<int, int>(dlpack::kCpu, 0); })
      .def("_dlpack_unchecked", &dlpack_unchecked)
      .def_ro("_exports", &Buffer::exports)
      .def("_detach", [](Buffer& b) { return reinterpret_cast<std::uintptr_t>(b.detach()); })
      .def_prop_ro("_data",
                   [](const Buffer& b) { return reinterpret_cast<std::uintptr_t>(b.view().data); })
      .def("unpack", &unpack,
           "A new array with one element a byte: for int4 and the other sub-byte types.")
      .def("pack", &pack, nb::arg("values"),
           "Writes an array of the buffer's shape and dtype, packed as XLA has it.")
      .def("__repr__", &repr);
}

}  // namespace callgate::bindings
