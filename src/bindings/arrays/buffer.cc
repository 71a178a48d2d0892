// SPDX-License-Identifier: Apache-2.0
// Buffer, and the protocols for its memory: NumPy's, Python's buffer protocol, DLPack, and CUDA's
// array interface. The GIL is held.
//
// On a GPU, work on XLA's stream that may not have run yet writes the arrays of a Buffer. A
// consumer names the stream in which it will use the memory, and only this stream waits. The
// default streams that consumers name are recorded: they live as long as the process, so XLA's
// stream can wait for them when the call ends.
#include "bindings/arrays/buffer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/arrays/results.h"
#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "core/lifecycle.h"

namespace callgate::bindings {

namespace {

// "cpu:3" by the device's global id, "cuda:1" by the driver's number.
std::string device_text(const Buffer& buffer) {
  return buffer.gpu ? "cuda:" + std::to_string(buffer.gpu->device->ordinal())
                    : "cpu:" + std::to_string(buffer.device);
}

// Throws if XLA has taken the memory back.
void check_alive(const Buffer& buffer) {
  if (buffer.ended)
    raise(PyExc_BufferError,
          "Buffer: its call has ended, and its memory on the GPU is XLA's again; use a Buffer of "
          "the running call");
}

// Throws for packed types; `what` is the called method.
void refuse_packed(const Buffer& buffer, const char* what) {
  if (!is_packed(buffer.view.dtype)) return;
  std::string text = std::string("Buffer.") + what + ": " + to_string(buffer.view) +
                     " has several elements in a byte";
  if (!buffer.gpu) text += "; use unpack() to read one element a byte, or pack() to write";
  raise(PyExc_BufferError, text);
}

// For functions that read or write the memory on the host.
const Buffer& on_host(nb::handle self, const char* what) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  if (!buffer.gpu) return buffer;
  raise(PyExc_TypeError, std::string("Buffer.") + what + ": " + to_string(buffer.view) + " is on " +
                             device_text(buffer) +
                             "; use arrays=\"numpy\" for a copy in host memory, or read it on the "
                             "GPU by __dlpack__ or __cuda_array_interface__");
}

// NumPy's dtype of the elements. Throws if NumPy has none.
nb::object dtype_of(const Buffer& buffer) {
  PyArray_Descr* descr = descr_of(buffer.view.dtype);
  if (descr == nullptr) raise(PyExc_TypeError, "Buffer.dtype: NumPy has no dtype for this type");
  return nb::borrow(reinterpret_cast<PyObject*>(descr));
}

// A type's letter in the struct module, for Python's buffer protocol; null for types that NumPy
// lacks.
const char* format_of(DType dtype) noexcept {
  constexpr std::pair<DType, const char*> kFormats[] = {
      {DType::kPred, "?"}, {DType::kS8, "b"},   {DType::kS16, "h"}, {DType::kS32, "i"},
      {DType::kS64, "q"},  {DType::kU8, "B"},   {DType::kU16, "H"}, {DType::kU32, "I"},
      {DType::kU64, "Q"},  {DType::kF16, "e"},  {DType::kF32, "f"}, {DType::kF64, "d"},
      {DType::kC64, "Zf"}, {DType::kC128, "Zd"}};
  const auto* found = std::ranges::find(kFormats, dtype, &std::pair<DType, const char*>::first);
  return found == std::end(kFormats) ? nullptr : found->second;
}

// NumPy's protocol: https://numpy.org/doc/stable/user/basics.interoperability.html
nb::object array(nb::handle self, nb::object dtype, nb::object copy) {
  const Buffer& buffer = on_host(self, "__array__");
  refuse_packed(buffer, "__array__");
  const bool other = !dtype.is_none() &&
                     !nb::module_::import_("numpy").attr("dtype")(dtype).equal(dtype_of(buffer));
  const bool copied = !copy.is_none() && nb::cast<bool>(copy);
  if (other && !copy.is_none() && !copied)
    raise(PyExc_ValueError,
          "Buffer.__array__: expected the buffer's dtype with copy=False, since another one needs "
          "a copy");
  if (!other && copied) return make_copy(buffer.view);
  nb::object view = make_array(buffer.view, !buffer.readonly, self.ptr());
  return other ? nb::object(view.attr("astype")(dtype)) : view;
}

int get_buffer(PyObject* self, Py_buffer* out, int flags) {
  auto& buffer = nb::cast<Buffer&>(nb::handle(self));
  const ArrayView& view = buffer.view;
  const char* format = format_of(view.dtype);
  // True if the order of the dimensions doesn't matter.
  auto longer = [](std::int64_t extent) { return extent > 1; };
  bool fortran_too = view.size() == 0 || std::ranges::count_if(buffer.dims, longer) <= 1;
  std::string refused;
  if (buffer.gpu) {
    refused = to_string(view) + " is on " + device_text(buffer) + ", where the host can't read it";
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
  // The protocol's fields are not const, but consumers don't write to them.
  if ((flags & PyBUF_FORMAT) != 0) out->format = const_cast<char*>(format);
  if ((flags & PyBUF_ND) != 0) out->shape = as_numpy(buffer.dims.data());
  if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) out->strides = as_numpy(buffer.byte_strides.data());
  return 0;
}

// One element per byte, sign-extended for signed integers: the layout of ml_dtypes' int4 and
// similar types.
nb::object unpack(nb::handle self) {
  const Buffer& buffer = on_host(self, "unpack");
  const ArrayView& view = buffer.view;
  if (!is_packed(view.dtype)) return array(self, nb::none(), nb::bool_(true));
  nb::object made = taken(PyArray_SimpleNew(view.rank, as_numpy(buffer.dims.data()), NPY_UINT8));
  auto* out = static_cast<unsigned char*>(data_of(made));
  const auto* in = static_cast<const unsigned char*>(view.data);
  const auto width = static_cast<unsigned>(bits(view.dtype));
  const bool is_signed = name(view.dtype).starts_with("int");
  for (std::size_t i = 0; i < view.size(); ++i) {  // a byte's first element is in its lowest bits
    unsigned value = in[i * width / 8] >> (i * width % 8) & ((1U << width) - 1);
    if (is_signed && (value >> (width - 1)) != 0) value |= 0xffU << width;
    out[i] = static_cast<unsigned char>(value);
  }
  return made.attr("view")(dtype_of(buffer));
}

void pack(nb::handle self, nb::handle values) {
  const Buffer& buffer = on_host(self, "pack");
  const ArrayView& view = buffer.view;
  if (buffer.readonly) raise(PyExc_TypeError, "Buffer.pack: an input of a gate is read-only");
  auto expected = [&](const std::string& got) {
    raise(PyExc_TypeError, "Buffer.pack: expected " + to_string(view) + ", got " + got);
  };
  if (is_masked(values.ptr())) expected(describe(values.ptr()));
  nb::object numpy = nb::module_::import_("numpy");
  nb::object array = numpy.attr("asarray")(values, nb::arg("order") = "C");
  if (!array.attr("dtype").equal(dtype_of(buffer)) ||
      !nb::cast<bool>(numpy.attr("array_equal")(array.attr("shape"), self.attr("shape"))))
    expected(nb::str("{}{}").format(array.attr("dtype"), array.attr("shape")).c_str());
  if (!is_packed(view.dtype)) return copy_to(view, data_of(array));
  const auto* in = static_cast<const unsigned char*>(data_of(array));
  auto* out = static_cast<unsigned char*>(view.data);
  const auto width = static_cast<unsigned>(bits(view.dtype));
  fill(view, 0);
  for (std::size_t i = 0; i < view.size(); ++i) {
    unsigned char& byte = out[i * width / 8];
    byte = static_cast<unsigned char>(byte | (in[i] & ((1U << width) - 1)) << (i * width % 8));
  }
}

// --- DLPack and CUDA's array interface -----------------------------------------------------------

[[noreturn]] void refuse_export(const std::string& why, PyObject* type = PyExc_BufferError) {
  raise(type, "Buffer.__dlpack__: " + why);
}

// An exported tensor with the Buffer that it keeps alive.
template <typename Managed>
struct Export : Immovable {
  ~Export() {
    if (Lifecycle::instance().closed()) return;
    GilScope gil;  // consumers may drop their tensor on any thread
    nb::cast<Buffer&>(nb::handle(buffer)).exports += -1;
    Py_DECREF(buffer);
  }

  Managed managed{};
  PyObject* buffer;
  std::vector<std::int64_t> strides;
};

dlpack::Device device_of(const Buffer& buffer) {
  return buffer.gpu ? dlpack::Device{dlpack::kCuda, buffer.gpu->device->ordinal()}
                    : dlpack::Device{dlpack::kCpu, 0};
}

Buffer& exportable(nb::handle self) {
  auto& buffer = nb::cast<Buffer&>(self);
  check_alive(buffer);
  refuse_packed(buffer, "__dlpack__");
  return buffer;
}

// As a capsule. A consumer that takes the tensor renames the capsule; only an unused one is
// released here.
template <typename Managed>
nb::object export_as(nb::object self, bool copied, [[maybe_unused]] std::uint64_t flags = 0) {
  const auto& from = nb::cast<const Buffer&>(self);
  const auto type = dlpack::data_type(from.view.dtype);
  if (!type) refuse_export("DLPack has no type for " + to_string(from.view));
  if (copied) {  // of host memory
    Buffer copy(from.view, from.readonly, from.device, nullptr);
    copy.detach();
    self = nb::cast(std::move(copy));
  }
  auto& buffer = nb::cast<Buffer&>(self);
  auto exported = std::make_unique<Export<Managed>>();
  buffer.exports += 1;
  exported->buffer = self.release().ptr();
  for (std::int64_t stride : buffer.byte_strides)
    exported->strides.push_back(stride * 8 / bits(buffer.view.dtype));
  Managed& managed = exported->managed;
  managed.tensor = {buffer.view.data,
                    device_of(buffer),
                    buffer.view.rank,
                    *type,
                    buffer.dims.data(),
                    exported->strides.data(),
                    0};
  managed.context = exported.get();
  managed.deleter = [](Managed* tensor) { delete static_cast<Export<Managed>*>(tensor->context); };
  if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
    managed.major = 1;
    managed.flags = flags;
  }
  nb::object capsule = taken(PyCapsule_New(&managed, Managed::kName, [](PyObject* made) {
    if (!PyCapsule_IsValid(made, Managed::kName)) return;
    auto* tensor = static_cast<Managed*>(PyCapsule_GetPointer(made, Managed::kName));
    tensor->deleter(tensor);
  }));
  (void)exported.release();
  return capsule;
}

// The stream that a consumer names, as an integer; None is the legacy default stream.
std::int64_t consumer_stream(nb::handle stream) {
  if (stream.is_none()) return 1;
  if (!PyLong_Check(stream.ptr()))
    refuse_export(
        std::string("stream: expected None or an int, got ") + nb::type_name(stream.type()).c_str(),
        PyExc_TypeError);
  auto number = nb::cast<std::int64_t>(stream);
  if (number == 0 || number < -1)
    refuse_export(
        "stream: expected None, -1 (no waiting), 1 (the legacy default stream), 2 (the thread's "
        "default stream) or a stream's address, got " +
            std::to_string(number),
        PyExc_ValueError);
  return number;
}

// https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html
nb::object dlpack_export(nb::object self, nb::object stream, nb::object max_version,
                         nb::object dl_device, nb::object copy) {
  using Pair = std::pair<int, int>;
  Buffer& buffer = exportable(self);
  const dlpack::Device here = device_of(buffer);
  const bool on_gpu = buffer.gpu.has_value();
  const bool want_copy = !copy.is_none() && nb::cast<bool>(copy);
  if (!on_gpu && !stream.is_none() && nb::cast<std::int64_t>(stream) != -1)
    refuse_export("stream: expected None for memory of the CPU");
  if (!dl_device.is_none() && nb::cast<Pair>(dl_device) != Pair(here.device_type, here.device_id)) {
    if (!on_gpu) refuse_export("dl_device: expected None or (1, 0), the CPU");
    refuse_export("dl_device: expected None or (2, " + std::to_string(here.device_id) +
                  "), the buffer's GPU, got " + nb::str(dl_device).c_str() +
                  "; use arrays=\"numpy\" for copies in host memory");
  }
  const bool versioned = !max_version.is_none() && nb::cast<Pair>(max_version).first >= 1;
  // Version 0 can't express "read-only", so its consumers get a copy of an input on the CPU.
  const bool copied = want_copy || (!on_gpu && !versioned && buffer.readonly);
  if (on_gpu) {
    // Never copies: a consumer copies on its own stream. Version 0 has no notion of read-only, as
    // for other libraries' arrays that must not be written.
    if (want_copy)
      refuse_export(
          "copy: expected None or False on a GPU, where consumers copy on their own streams, got "
          "True");
    std::int64_t consumer = consumer_stream(stream);
    if (consumer != -1 && buffer.memory == nullptr) {
      buffer.gpu->hold_back(consumer);
      if (consumer == 1 || consumer == 2) buffer.gpu->default_streams |= 1U << consumer;
    }
  } else if (copied && !copy.is_none() && !want_copy) {
    refuse_export(
        "an input is read-only, which DLPack supports from version 1 on; pass max_version=(1, 0), "
        "or allow a copy");
  }
  if (!versioned) return export_as<dlpack::ManagedTensor>(self, copied);
  std::uint64_t flags = copied ? dlpack::kCopied : buffer.readonly ? dlpack::kReadOnly : 0;
  return export_as<dlpack::ManagedTensorVersioned>(self, copied, flags);
}

[[noreturn]] void refuse_interface(const std::string& why) {
  raise(PyExc_AttributeError, "Buffer.__cuda_array_interface__: " + why + "__dlpack__");
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
nb::dict cuda_array_interface(Buffer& buffer) {
  check_alive(buffer);
  const std::string type = to_string(buffer.view);
  if (!buffer.gpu) refuse_interface(type + " is on the CPU; use __array__ or ");
  // Types of ml_dtypes have misleading names.
  if (format_of(buffer.view.dtype) == nullptr)
    refuse_interface("the interface has no name for the elements of " + type + "; use ");
  std::uintptr_t address = buffer.view.size() == 0 ? 0 : number_of(buffer.view.data);
  // Consumers don't name their stream; by default it is this one.
  buffer.gpu->default_streams |= 1u << 1;
  return dict_of("shape", tuple_of(buffer.dims), "typestr", dtype_of(buffer).attr("str"), "data",
                 nb::make_tuple(address, buffer.readonly), "strides", nb::none(), "version", 3,
                 "stream", buffer.gpu->number());
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
                              {0, nullptr}};

}  // namespace

void bind_buffer(nb::module_& module) {
  nb::class_<Buffer>(
      module, "Buffer", nb::type_slots(buffer_slots), nb::is_weak_referenceable(),
      "An array of the running call, over XLA's own memory; valid during the call.\n\n"
      "On the CPU, NumPy reads it through `__array__` or the buffer protocol. On a GPU, array "
      "libraries\nread it through `__cuda_array_interface__` (version 3). DLPack works on both. "
      "Inputs are\nread-only.\n\n"
      "On a GPU, enqueue work on the array on XLA's stream, `stream`. Work on CUDA's default "
      "streams runs\nbefore XLA's next work if the library requested the array through one of "
      "these protocols.\nSynchronize any other stream with XLA's yourself.")
      .def_prop_ro(
          "shape", [](const Buffer& b) { return tuple_of(b.dims); },
          "The shape; the memory layout is dense and row-major.")
      .def_prop_ro("dtype", &dtype_of, "The NumPy or ml_dtypes dtype.")
      .def_prop_ro(
          "ndim", [](const Buffer& b) { return b.dims.size(); }, "The number of dimensions.")
      .def_prop_ro(
          "size", [](const Buffer& b) { return b.view.size(); }, "The number of elements.")
      .def_prop_ro(
          "nbytes", [](const Buffer& b) { return b.view.nbytes(); },
          "The size in XLA's memory in bytes; packed sub-byte types round up to a whole byte.")
      .def_prop_ro("device", &device_text,
                   R"("cpu:" and the device's global id, or "cuda:" and the GPU's number.)")
      .def_prop_ro(
          "stream", [](const Buffer& b) { return b.gpu ? b.gpu->number() : 0; },
          "XLA's CUDA stream as an integer, numbered as in `__cuda_array_interface__`; 0 on the "
          "CPU.")
      .def_ro("readonly", &Buffer::readonly, "True for inputs, False for results.")
      .def_prop_ro(
          "writeable", [](const Buffer& b) { return !b.readonly; },
          "True for results, False for inputs.")
      .def("__array__", &array, nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def_prop_ro("_exports", [](const Buffer& b) -> int { return b.exports; })
      .def("_detach", [](Buffer& b) { return number_of(b.detach()); })
      .def_prop_ro("_data", [](const Buffer& b) { return number_of(b.view.data); })
      .def(
          "unpack", &unpack,
          "Returns a new NumPy array with one element per byte, for int4 and other sub-byte types.")
      .def("pack", &pack, nb::arg("values"),
           "Writes an array of the buffer's shape and dtype in XLA's packed form.")
      .def("__repr__",
           [](const Buffer& b) {
             return "Buffer(" + to_string(b.view) + ", device=" + device_text(b) +
                    (b.readonly ? ", read-only)" : ")");
           })
      .def("__dlpack__", &dlpack_export, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none())
      .def("__dlpack_device__",
           [](const Buffer& b) {
             const dlpack::Device device = device_of(b);
             return std::pair<int, int>(device.device_type, device.device_id);
           })
      // Zero-copy also for an input and a consumer without a notion of read-only, for
      // `arrays="torch"`, whose documentation forbids writing.
      .def("_dlpack_unchecked",
           [](nb::object self) {
             exportable(self);
             return export_as<dlpack::ManagedTensor>(std::move(self), /*copied=*/false);
           })
      .def_prop_ro("__cuda_array_interface__", &cuda_array_interface,
                   "The CUDA array interface, version 3. Raises AttributeError on the CPU, and for "
                   "dtypes that the interface lacks.");
  // Points `array`, a view of `old_data`'s memory that may outlive it, to the same offset in
  // `new_data`. With `base`, the array keeps this object alive.
  module.def(
      "repoint",
      [](nb::handle array, std::uintptr_t old_data, std::uintptr_t new_data, nb::object base) {
        auto* fields = reinterpret_cast<PyArrayObject_fields*>(array.ptr());
        fields->data += static_cast<std::ptrdiff_t>(new_data - old_data);
        if (!base.is_none()) Py_XDECREF(std::exchange(fields->base, base.release().ptr()));
      },
      nb::arg("array"), nb::arg("old_data"), nb::arg("new_data"), nb::arg("base").none());
  module.def(
      "store",
      [](nb::handle target, nb::handle value, bool cast) {
        return store(view_of(target, "store"), value.ptr(), cast);
      },
      nb::arg("target"), nb::arg("value").none(), nb::arg("cast"),
      "Copies a gate's returned value into an array; returns a description if it has another "
      "type.");
}

}  // namespace callgate::bindings
