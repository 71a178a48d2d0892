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
#include "bindings/python/gil.h"

namespace callgate::bindings {

Buffer::Buffer(const ArrayView& of, bool is_readonly, std::int64_t on_device, const DeviceCall* on)
    : dims(of.dims, of.dims + of.rank),
      byte_strides(dims.size(), bits(of.dtype) / 8),  // 0, and unused, for packed ones
      view(of),
      readonly(is_readonly),
      device(on_device) {
  if (on != nullptr) gpu = *on;
  view.dims = dims.data();
  for (std::size_t axis = dims.size(); axis-- > 1;)
    byte_strides[axis - 1] = byte_strides[axis] * std::max<std::int64_t>(dims[axis], 1);
}

void* Buffer::detach() {
  void* before = view.data;
  if (gpu) {
    view.data = nullptr;
    ended = true;
    return before;
  }
  owned = std::make_unique<char[]>(view.nbytes() + 1);
  if (view.nbytes() != 0) std::memcpy(owned.get(), before, view.nbytes());
  view.data = owned.get();
  return before;
}

std::string Buffer::device_text() const {
  return gpu ? "cuda:" + std::to_string(gpu->device->ordinal()) : "cpu:" + std::to_string(device);
}

void Buffer::check_alive() const {
  if (!ended) return;
  throw nb::buffer_error(
      "Buffer: the call that it belonged to is over, and its memory on the GPU is XLA's again; "
      "expected a Buffer of the running call");
}

void Buffer::refuse_packed(const char* what) const {
  if (!is_packed(view.dtype)) return;
  std::string text = std::string("Buffer.") + what + ": " + to_string(view) +
                     " packs several elements into a byte";
  if (!gpu) text += "; use unpack() for an array with one element a byte, pack() to write one";
  refuse(nb::buffer_error, text);
}

nb::object Buffer::dtype() const {
  PyArray_Descr* descr = descriptors()[static_cast<std::size_t>(view.dtype)];
  if (descr == nullptr) throw nb::type_error("Buffer.dtype: NumPy has no dtype for this type");
  return nb::borrow(reinterpret_cast<PyObject*>(descr));
}

const char* format_of(DType dtype) noexcept {
  constexpr std::pair<DType, const char*> kFormats[] = {
      {DType::kPred, "?"}, {DType::kS8, "b"},   {DType::kS16, "h"}, {DType::kS32, "i"},
      {DType::kS64, "q"},  {DType::kU8, "B"},   {DType::kU16, "H"}, {DType::kU32, "I"},
      {DType::kU64, "Q"},  {DType::kF16, "e"},  {DType::kF32, "f"}, {DType::kF64, "d"},
      {DType::kC64, "Zf"}, {DType::kC128, "Zd"}};
  const auto* found = std::ranges::find(kFormats, dtype, &std::pair<DType, const char*>::first);
  return found == std::end(kFormats) ? nullptr : found->second;
}

namespace {

// For what reads or writes the memory on the host.
void refuse_gpu(const Buffer& buffer, const char* what) {
  if (!buffer.gpu) return;
  refuse(nb::type_error,
         std::string("Buffer.") + what + ": " + to_string(buffer.view) + " is on " +
             buffer.device_text() +
             ", and the host can't read it there; use arrays=\"numpy\" for copies in the "
             "host's memory, or __dlpack__ or __cuda_array_interface__ where it is");
}

// NumPy's protocol: https://numpy.org/doc/stable/user/basics.interoperability.html
nb::object array(nb::handle self, nb::object dtype, nb::object copy) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  refuse_gpu(buffer, "__array__");
  buffer.refuse_packed("__array__");
  bool other =
      !dtype.is_none() && !nb::module_::import_("numpy").attr("dtype")(dtype).equal(buffer.dtype());
  if (other && !copy.is_none() && !nb::cast<bool>(copy))
    throw nb::value_error("Buffer.__array__: a dtype other than the buffer's needs a copy");
  if (!other && !copy.is_none() && nb::cast<bool>(copy)) return taken(make_copy(buffer.view));
  nb::object view = taken(make_array(buffer.view, !buffer.readonly, self.ptr()));
  return other ? nb::object(view.attr("astype")(dtype)) : view;
}

int get_buffer(PyObject* self, Py_buffer* out, int flags) {
  const auto& buffer = nb::cast<const Buffer&>(nb::handle(self));
  const ArrayView& view = buffer.view;
  const char* format = format_of(view.dtype);
  // Whether the order of the dimensions makes no difference.
  auto longer = [](std::int64_t extent) { return extent > 1; };
  bool fortran_too = view.size() == 0 || std::ranges::count_if(buffer.dims, longer) <= 1;
  std::string refused;
  if (buffer.gpu) {
    refused = to_string(view) + " is on " + buffer.device_text() + ", where the host can't read it";
  } else if (format == nullptr) {
    refused = "the buffer protocol has no format for " + to_string(view);
  } else if ((flags & PyBUF_WRITABLE) != 0 && buffer.readonly) {
    refused = "an input of a gate is read-only";
  } else if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !fortran_too) {
    refused = "expected a request for row-major (C) order, which " + to_string(view) +
              " has, got one for column-major (Fortran) order";
  }
  if (!refused.empty()) {
    PyErr_SetString(PyExc_BufferError, ("Buffer: " + refused).c_str());
    return -1;
  }
  *out = {};
  out->buf = view.data;
  Py_INCREF(self);
  out->obj = self;
  out->len = static_cast<Py_ssize_t>(view.nbytes());
  out->itemsize = bits(view.dtype) / 8;
  out->readonly = buffer.readonly;
  out->ndim = view.rank;
  // The protocol's fields are not const; consumers do not write to them.
  auto extents = [](const std::vector<std::int64_t>& of) {
    return reinterpret_cast<Py_ssize_t*>(const_cast<std::int64_t*>(of.data()));
  };
  if ((flags & PyBUF_FORMAT) != 0) out->format = const_cast<char*>(format);
  if ((flags & PyBUF_ND) != 0) out->shape = extents(buffer.dims);
  if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) out->strides = extents(buffer.byte_strides);
  return 0;
}

// How elements lie in bytes, the first in the lowest bits.
struct Packing {
  explicit Packing(DType dtype)
      : width(static_cast<unsigned>(bits(dtype))), per_byte(8 / width), mask((1U << width) - 1) {}
  unsigned shift(std::size_t i) const { return static_cast<unsigned>(i % per_byte) * width; }

  unsigned width;
  std::size_t per_byte;
  unsigned mask;
};

// One element a byte, sign-extended for signed integers: the layout of ml_dtypes' int4 and friends.
nb::object unpack(nb::handle self) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  refuse_gpu(buffer, "unpack");
  const ArrayView& view = buffer.view;
  if (!is_packed(view.dtype)) return array(self, nb::none(), nb::bool_(true));
  nb::object made = taken(PyArray_SimpleNew(view.rank, buffer.dims.data(), NPY_UINT8));
  auto* out = static_cast<unsigned char*>(data_of(made));
  const auto* in = static_cast<const unsigned char*>(view.data);
  const Packing packing(view.dtype);
  bool is_signed = name(view.dtype).starts_with("int");
  for (std::size_t i = 0; i < view.size(); ++i) {
    unsigned value = (in[i / packing.per_byte] >> packing.shift(i)) & packing.mask;
    if (is_signed && (value >> (packing.width - 1)) != 0) value |= 0xffU << packing.width;
    out[i] = static_cast<unsigned char>(value);
  }
  return made.attr("view")(buffer.dtype());
}

void pack(nb::handle self, nb::handle values) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  refuse_gpu(buffer, "pack");
  const ArrayView& view = buffer.view;
  if (buffer.readonly) throw nb::type_error("Buffer.pack: an input of a gate is read-only");
  auto expected = [&](const std::string& got) {
    refuse(nb::type_error, "Buffer.pack: expected " + to_string(view) + ", got " + got);
  };
  if (is_masked(values.ptr())) {
    std::string got;
    if (!describe(values.ptr(), got)) nb::raise_python_error();
    expected(got);
  }
  nb::object numpy = nb::module_::import_("numpy");
  nb::object array = numpy.attr("asarray")(values, nb::arg("order") = "C");
  if (!array.attr("dtype").equal(buffer.dtype()) ||
      !nb::cast<bool>(numpy.attr("array_equal")(array.attr("shape"), self.attr("shape")))) {
    auto text = [&](const char* of) { return nb::str(nb::object(array.attr(of))); };
    expected(std::string(text("dtype").c_str()) + text("shape").c_str());
  }
  void* data = data_of(array);
  if (!is_packed(view.dtype)) return copy_to(view, data);
  const auto* in = static_cast<const unsigned char*>(data);
  auto* out = static_cast<unsigned char*>(view.data);
  const Packing packing(view.dtype);
  if (view.nbytes() != 0) std::memset(out, 0, view.nbytes());
  for (std::size_t i = 0; i < view.size(); ++i) {
    unsigned char& byte = out[i / packing.per_byte];
    byte = static_cast<unsigned char>(byte | (in[i] & packing.mask) << packing.shift(i));
  }
}

std::string repr(const Buffer& buffer) {
  return "Buffer(" + to_string(buffer.view) + ", device=" + buffer.device_text() +
         (buffer.readonly ? ", read-only)" : ")");
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
  type.def_prop_ro("shape", &Buffer::shape,
                   "Extents, outermost first; the layout is dense and row-major.")
      .def_prop_ro("dtype", &Buffer::dtype, "The NumPy (or ml_dtypes) dtype.")
      .def_prop_ro("ndim", [](const Buffer& b) { return b.dims.size(); })
      .def_prop_ro("size", [](const Buffer& b) { return b.view.size(); })
      .def_prop_ro(
          "nbytes", [](const Buffer& b) { return b.view.nbytes(); },
          "Bytes of XLA's memory; sub-byte types count whole bytes.")
      .def_prop_ro("device", &Buffer::device_text,
                   "'cpu:' and the device's global id, or 'cuda:' and the GPU's number.")
      .def_prop_ro(
          "stream", [](const Buffer& b) { return b.gpu ? b.gpu->number() : 0; },
          "XLA's CUDA stream as an integer, as the exchange protocols number it; 0 on the CPU.")
      .def_ro("readonly", &Buffer::readonly, "True for inputs, False for results.")
      .def_prop_ro("writeable", [](const Buffer& b) { return !b.readonly; })
      .def("__array__", &array, nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def_ro("_exports", &Buffer::exports)
      .def("_detach", [](Buffer& b) { return number_of(b.detach()); })
      .def_prop_ro("_data", [](const Buffer& b) { return number_of(b.view.data); })
      .def("unpack", &unpack,
           "A new array with one element a byte: for int4 and the other sub-byte types.")
      .def("pack", &pack, nb::arg("values"),
           "Writes an array of the buffer's shape and dtype, packed as XLA has it.")
      .def("__repr__", &repr);
  bind_buffer_exchange(type);
  // Points `array`, a view of `old_data`'s memory that may outlive it, to the same offset in
  // `new_data`. With `base`, the array holds it from now on.
  module.def(
      "repoint",
      [](nb::handle array, std::uintptr_t old_data, std::uintptr_t new_data, nb::object base) {
        auto* fields = reinterpret_cast<PyArrayObject_fields*>(array.ptr());
        fields->data += static_cast<std::ptrdiff_t>(new_data - old_data);
        if (!base.is_none()) Py_XDECREF(std::exchange(fields->base, base.release().ptr()));
      },
      nb::arg("array"), nb::arg("old_data"), nb::arg("new_data"), nb::arg("base").none());
}

}  // namespace callgate::bindings
