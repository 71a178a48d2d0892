// Buffer, and its protocols but for the exchange of memory: NumPy's and Python's buffer protocol.
// The GIL is held.
#include "bindings/arrays/buffer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings/arrays/views.h"
#include "bindings/python/python.h"

namespace callgate::bindings {

Buffer::Buffer(const ArrayView& view, bool readonly, std::int64_t device, const DeviceCall* gpu)
    : dims_(view.dims, view.dims + view.rank),
      strides_(dims_.size(), 1),
      byte_strides_(dims_.size()),
      view_(view),
      readonly_(readonly),
      device_(device) {
  if (gpu != nullptr) gpu_ = *gpu;
  view_.dims = dims_.data();
  for (std::size_t axis = dims_.size(); axis-- > 1;)
    strides_[axis - 1] = strides_[axis] * std::max<std::int64_t>(dims_[axis], 1);
  for (std::size_t axis = 0; axis < dims_.size(); ++axis)
    byte_strides_[axis] = strides_[axis] * bits(view_.dtype) / 8;
}

Buffer::Buffer(const ArrayView& view, const DeviceCall& gpu, std::shared_ptr<DeviceMemory> memory)
    : Buffer(view, /*readonly=*/false, gpu.device->id(), &gpu) {
  memory_ = std::move(memory);
}

void* Buffer::detach() {
  void* before = view_.data;
  if (gpu_) {
    view_.data = nullptr;
    ended_ = true;
    return before;
  }
  owned_ = std::make_unique<char[]>(view_.nbytes() + 1);
  if (view_.nbytes() != 0) std::memcpy(owned_.get(), before, view_.nbytes());
  view_.data = owned_.get();
  return before;
}

std::string Buffer::device_text() const {
  if (gpu_) return "cuda:" + std::to_string(gpu_->device->ordinal());
  return "cpu:" + std::to_string(device_);
}

void Buffer::check_alive() const {
  if (!ended_) return;
  throw nb::buffer_error(
      "Buffer: the call that it belonged to is over, and its memory on the GPU is XLA's again; "
      "expected a Buffer of the running call");
}

PyObject* make_buffer(const ArrayView& view, bool writable, std::int64_t device,
                      const DeviceCall* gpu) {
  return nb::cast(Buffer(view, !writable, device, gpu), nb::rv_policy::move).release().ptr();
}

void refuse_packed(const Buffer& buffer, const char* what) {
  if (!is_packed(buffer.view().dtype)) return;
  std::string text = std::string("Buffer.") + what + ": " + to_string(buffer.view()) +
                     " packs several elements into a byte";
  if (buffer.gpu() == nullptr)
    text += "; use unpack() for an array with one element a byte, pack() to write one";
  throw nb::buffer_error(text.c_str());
}

nb::tuple shape_of(const Buffer& buffer) {
  nb::list shape;
  for (std::int64_t extent : buffer.dims()) shape.append(extent);
  return nb::tuple(shape);
}

nb::object dtype_of(const Buffer& buffer) {
  PyArray_Descr* descr = descriptors()[static_cast<std::size_t>(buffer.view().dtype)];
  if (descr == nullptr) throw nb::type_error("Buffer.dtype: NumPy has no dtype for this type");
  return nb::borrow(reinterpret_cast<PyObject*>(descr));
}

namespace {

// For what reads or writes the memory on the host.
void refuse_gpu(const Buffer& buffer, const char* what) {
  if (buffer.gpu() == nullptr) return;
  throw nb::type_error(
      (std::string("Buffer.") + what + ": " + to_string(buffer.view()) + " is on " +
       buffer.device_text() +
       ", and the host can't read it there; use arrays=\"numpy\" for copies in the "
       "host's memory, or __dlpack__ or __cuda_array_interface__ where it is")
          .c_str());
}

nb::object checked(PyObject* object) {
  if (object == nullptr) nb::raise_python_error();
  return nb::steal(object);
}

// NumPy's protocol: https://numpy.org/doc/stable/user/basics.interoperability.html
nb::object array(nb::handle self, nb::object dtype, nb::object copy) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  refuse_gpu(buffer, "__array__");
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

// Whether the order of the dimensions makes no difference.
bool fortran_too(const Buffer& buffer) {
  auto longer = [](std::int64_t extent) { return extent > 1; };
  return buffer.view().size() == 0 || std::ranges::count_if(buffer.dims(), longer) <= 1;
}

int get_buffer(PyObject* self, Py_buffer* out, int flags) {
  const auto& buffer = nb::cast<const Buffer&>(nb::handle(self));
  if (buffer.gpu() != nullptr) {
    PyErr_Format(PyExc_BufferError, "Buffer: %s is on %s, where the host can't read it",
                 to_string(buffer.view()).c_str(), buffer.device_text().c_str());
    return -1;
  }
  const char* format = format_of(buffer.view().dtype);
  if (format == nullptr) {
    PyErr_Format(PyExc_BufferError, "Buffer: the buffer protocol has no format for %s",
                 to_string(buffer.view()).c_str());
    return -1;
  }
  if ((flags & PyBUF_WRITABLE) != 0 && buffer.readonly()) {
    PyErr_SetString(PyExc_BufferError, "Buffer: an input of a gate is read-only");
    return -1;
  }
  if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !fortran_too(buffer)) {
    PyErr_Format(PyExc_BufferError,
                 "Buffer: expected a request for row-major (C) order, which %s has, got one for "
                 "column-major (Fortran) order",
                 to_string(buffer.view()).c_str());
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
  refuse_gpu(buffer, "unpack");
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
  refuse_gpu(buffer, "pack");
  const ArrayView& view = buffer.view();
  if (buffer.readonly()) throw nb::type_error("Buffer.pack: an input of a gate is read-only");
  if (is_masked(values.ptr())) {
    std::string got;
    if (!describe(values.ptr(), got)) nb::raise_python_error();
    throw nb::type_error(
        ("Buffer.pack: expected " + to_string(buffer.view()) + ", got " + got).c_str());
  }
  nb::object numpy = nb::module_::import_("numpy");
  nb::object array = numpy.attr("asarray")(values, nb::arg("order") = "C");
  if (!array.attr("dtype").equal(dtype_of(buffer)) ||
      !nb::cast<bool>(numpy.attr("array_equal")(array.attr("shape"), self.attr("shape")))) {
    throw nb::type_error(("Buffer.pack: expected " + to_string(buffer.view()) + ", got " +
                          nb::cast<std::string>(nb::str(nb::object(array.attr("dtype")))) +
                          nb::cast<std::string>(nb::str(nb::object(array.attr("shape")))))
                             .c_str());
  }
  auto* source = reinterpret_cast<PyArrayObject*>(array.ptr());
  if (!is_packed(view.dtype)) return copy_to(view, PyArray_DATA(source));
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
  return "Buffer(" + to_string(buffer.view()) + ", device=" + buffer.device_text() +
         (buffer.readonly() ? ", read-only)" : ")");
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
                              {0, nullptr}};

}  // namespace

void bind_buffer(nb::module_& module) {
  nb::class_<Buffer> type(
      module, "Buffer", nb::type_slots(buffer_slots), nb::is_weak_referenceable(),
      "An array of the running call: XLA's own memory, for the length of the call.\n\n"
      "On the CPU NumPy reads it (`__array__`, the buffer protocol), on a GPU libraries of arrays "
      "do\n(`__cuda_array_interface__` version 3), and both exchange it by DLPack. Inputs are "
      "read-only. On\na GPU work on the array belongs on XLA's stream, `stream`; what a library "
      "enqueues on one of\nCUDA's default streams, after it asked for the array by a protocol, is "
      "ordered before what XLA\ndoes next; of work on any other stream XLA's own has to wait by "
      "the callable's doing.");
  type.def_prop_ro("shape", &shape_of,
                   "Extents, outermost first; the layout is dense and row-major.")
      .def_prop_ro("dtype", &dtype_of, "The NumPy (or ml_dtypes) dtype.")
      .def_prop_ro("ndim", [](const Buffer& b) { return b.dims().size(); })
      .def_prop_ro("size", [](const Buffer& b) { return b.view().size(); })
      .def_prop_ro(
          "nbytes", [](const Buffer& b) { return b.view().nbytes(); },
          "Bytes of XLA's memory; sub-byte types count whole bytes.")
      .def_prop_ro("device", &Buffer::device_text,
                   "'cpu:' and the device's global id, or 'cuda:' and the GPU's number.")
      .def_prop_ro(
          "stream", [](const Buffer& b) { return b.gpu() == nullptr ? 0 : b.gpu()->number(); },
          "XLA's CUDA stream as an integer, as the exchange protocols number it; 0 on the CPU.")
      .def_prop_ro("readonly", &Buffer::readonly, "True for inputs, False for results.")
      .def_prop_ro("writeable", [](const Buffer& b) { return !b.readonly(); })
      .def("__array__", &array, nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def_ro("_exports", &Buffer::exports)
      .def("_detach", [](Buffer& b) { return reinterpret_cast<std::uintptr_t>(b.detach()); })
      .def_prop_ro("_data",
                   [](const Buffer& b) { return reinterpret_cast<std::uintptr_t>(b.view().data); })
      .def("unpack", &unpack,
           "A new array with one element a byte: for int4 and the other sub-byte types.")
      .def("pack", &pack, nb::arg("values"),
           "Writes an array of the buffer's shape and dtype, packed as XLA has it.")
      .def("__repr__", &repr);
  bind_buffer_exchange(type);
}

}  // namespace callgate::bindings
