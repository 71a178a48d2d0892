// How other libraries get at a Buffer's memory: DLPack, on the host and on GPUs, and CUDA's array
// interface. The GIL is held.
//
// On a GPU what the Buffer shows is written by work on XLA's stream that may not have run yet. A
// consumer says in which stream it will use the memory, and that stream waits; nobody else does. Of
// the streams that consumers name, the default ones are remembered: they live as
// long as the process, so XLA's stream can be made to wait for them when the call ends.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <utility>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/dlpack.h"
#include "bindings/python/gil.h"
#include "core/lifecycle.h"

namespace callgate::bindings {
namespace {

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

dlpack::Device device_of(const Buffer& buffer) {
  if (!buffer.gpu) return {dlpack::kCpu, 0};
  return {dlpack::kCuda, buffer.gpu->device->ordinal()};
}

template <typename Managed>
std::unique_ptr<Managed> export_tensor(nb::handle self, bool copied) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  auto type = dlpack::data_type(buffer.view.dtype);
  if (!type) {
    refuse(nb::buffer_error, "Buffer.__dlpack__: DLPack has no type for " + to_string(buffer.view));
  }
  auto exported = std::make_unique<Export>();
  auto managed = std::make_unique<Managed>();
  exported->shape = buffer.dims;
  exported->strides = buffer.strides;
  void* data = buffer.view.data;
  if (copied) {
    exported->copy = std::make_unique<char[]>(buffer.view.nbytes() + 1);
    if (buffer.view.nbytes() != 0) std::memcpy(exported->copy.get(), data, buffer.view.nbytes());
    data = exported->copy.get();
  } else {
    ++nb::cast<Buffer&>(self).exports;
    Py_INCREF(self.ptr());
    exported->buffer = self.ptr();
  }
  managed->tensor = {data,  device_of(buffer),      buffer.view.rank,
                     *type, exported->shape.data(), exported->strides.data(),
                     0};
  managed->context = exported.release();
  managed->deleter = &release<Managed>;
  return managed;
}

// The stream that a consumer names, as an integer; None is the legacy default stream.
std::int64_t consumer_stream(nb::handle stream) {
  if (stream.is_none()) return 1;
  if (!PyLong_Check(stream.ptr())) {
    refuse(nb::type_error, "Buffer.__dlpack__: stream: expected None or an int, got " +
                               std::string(nb::type_name(stream.type()).c_str()));
  }
  auto number = nb::cast<std::int64_t>(stream);
  if (number == 0 || number < -1) {
    refuse(nb::value_error,
           "Buffer.__dlpack__: stream: expected None, -1 (no waiting), 1 (the legacy "
           "default stream), 2 (the thread's default stream) or a stream's address, "
           "got " +
               std::to_string(number));
  }
  return number;
}

template <typename Managed>
nb::object export_as(nb::handle self, bool copied, std::uint64_t flags = 0) {
  std::unique_ptr<Managed> managed = export_tensor<Managed>(self, copied);
  if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
    managed->major = 1;
    managed->flags = flags;
    return capsule(std::move(managed), "dltensor_versioned");
  } else {
    return capsule(std::move(managed), "dltensor");
  }
}

// https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html
nb::object dlpack_export(nb::handle self, nb::object stream, nb::object max_version,
                         nb::object dl_device, nb::object copy) {
  auto& buffer = nb::cast<Buffer&>(self);
  buffer.check_alive();
  buffer.refuse_packed("__dlpack__");
  const dlpack::Device here = device_of(buffer);
  const bool on_gpu = buffer.gpu.has_value();
  const bool want_copy = !copy.is_none() && nb::cast<bool>(copy);
  if (!on_gpu && !stream.is_none() && nb::cast<std::int64_t>(stream) != -1)
    throw nb::buffer_error("Buffer.__dlpack__: stream must be None for memory of the CPU");
  if (!dl_device.is_none() &&
      nb::cast<std::pair<int, int>>(dl_device) != std::pair<int, int>(here.type, here.id)) {
    if (!on_gpu)
      throw nb::buffer_error("Buffer.__dlpack__: dl_device must be None or (1, 0), the CPU");
    refuse(nb::buffer_error, "Buffer.__dlpack__: dl_device: expected None or (2, " +
                                 std::to_string(here.id) + "), the buffer's GPU, got " +
                                 nb::str(dl_device).c_str() +
                                 "; arrays=\"numpy\" makes copies in the host's memory");
  }
  const bool versioned =
      !max_version.is_none() && nb::cast<std::pair<int, int>>(max_version).first >= 1;
  // Version 0 can't say "read-only": its consumers get a copy of an input of the CPU.
  bool copied = want_copy || (!on_gpu && !versioned && buffer.readonly);
  if (on_gpu) {
    // Never a copy: a consumer makes its own, on its own stream. One that asks for version 0 has no
    // notion of read-only, as with arrays of other libraries that are never to be written.
    if (want_copy) {
      throw nb::buffer_error(
          "Buffer.__dlpack__: copy: expected None or False on a GPU, where consumers copy, on "
          "their "
          "own streams; got True");
    }
    std::int64_t consumer = consumer_stream(stream);
    if (consumer != -1 && buffer.memory == nullptr) {
      buffer.gpu->hold_back(consumer);
      if (consumer == 1 || consumer == 2) buffer.default_streams |= 1U << consumer;
    }
  } else if (copied && !copy.is_none() && !want_copy) {
    throw nb::buffer_error(
        "Buffer.__dlpack__: an input is read-only, which DLPack can say from version 1 on; pass "
        "max_version=(1, 0), or let it copy");
  }
  if (!versioned) return export_as<dlpack::ManagedTensor>(self, copied);
  return export_as<dlpack::ManagedTensorVersioned>(self, copied,
                                                   copied            ? dlpack::kCopied
                                                   : buffer.readonly ? dlpack::kReadOnly
                                                                     : 0);
}

// Zero copy also for an input and a consumer without a notion of read-only: for `arrays="torch"`,
// whose documentation says not to write.
nb::object dlpack_unchecked(nb::handle self) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  buffer.check_alive();
  buffer.refuse_packed("__dlpack__");
  return export_as<dlpack::ManagedTensor>(self, /*copied=*/false);
}

// Whether the type is one of NumPy's own: those of ml_dtypes have names that say something else.
bool has_numpy_name(DType dtype) {
  auto type = dlpack::data_type(dtype);
  constexpr std::uint8_t kFloat = 2, kComplex = 5, kBool = 6;  // below: integers
  return type && (type->code <= kFloat || type->code == kComplex || type->code == kBool);
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
nb::dict cuda_array_interface(Buffer& buffer) {
  buffer.check_alive();
  std::string type = to_string(buffer.view);
  if (!buffer.gpu) {
    refuse(nb::attribute_error, "Buffer.__cuda_array_interface__: " + type +
                                    " is on the CPU; use __array__ or __dlpack__");
  }
  nb::object dtype = has_numpy_name(buffer.view.dtype) ? buffer.dtype() : nb::none();
  if (dtype.is_none())
    refuse(nb::attribute_error,
           "Buffer.__cuda_array_interface__: it has no name for the elements of " + type +
               "; use __dlpack__");
  const ArrayView& view = buffer.view;
  std::uintptr_t address = view.size() == 0 ? 0 : reinterpret_cast<std::uintptr_t>(view.data);
  nb::dict interface;
  interface["shape"] = buffer.shape();
  interface["typestr"] = dtype.attr("str");
  interface["data"] = nb::make_tuple(address, buffer.readonly);
  interface["strides"] = nb::none();
  interface["version"] = 3;
  interface["stream"] = buffer.gpu->number();
  // Consumers don't say which stream they use; by default it is this one.
  buffer.default_streams |= 1u << 1;
  return interface;
}

}  // namespace

void bind_buffer_exchange(nb::class_<Buffer>& type) {
  type.def("__dlpack__", &dlpack_export, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none())
      .def("__dlpack_device__",
           [](const Buffer& b) {
             dlpack::Device device = device_of(b);
             return std::pair<int, int>(device.type, device.id);
           })
      .def("_dlpack_unchecked", &dlpack_unchecked)
      .def_prop_ro("__cuda_array_interface__", &cuda_array_interface,
                   "CUDA's array interface, version 3; an AttributeError on the CPU and for types "
                   "that it can't name.");
}

}  // namespace callgate::bindings
