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
#include "core/lifecycle.h"

namespace callgate::bindings {
namespace {

// An exported tensor with what it keeps: the Buffer, or the memory of a copy.
template <typename Managed>
struct Export : Immovable {
  Managed managed{};
  PyObject* buffer = nullptr;
  std::unique_ptr<char[]> copy;
  std::vector<std::int64_t> shape, strides;

  ~Export() {
    if (buffer == nullptr || Lifecycle::instance().closed()) return;
    GilScope gil;  // consumers may drop their tensor on any thread
    --nb::cast<Buffer&>(nb::handle(buffer)).exports;
    Py_DECREF(buffer);
  }
};

dlpack::Device device_of(const Buffer& buffer) {
  if (!buffer.gpu) return {dlpack::kCpu, 0};
  return {dlpack::kCuda, buffer.gpu->device->ordinal()};
}

// As a capsule. A consumer that takes the tensor renames it; only an unused one is released here.
template <typename Managed>
nb::object export_as(nb::handle self, bool copied, [[maybe_unused]] std::uint64_t flags = 0) {
  auto& buffer = nb::cast<Buffer&>(self);
  const ArrayView& view = buffer.view;
  auto type = dlpack::data_type(view.dtype);
  if (!type)
    refuse(nb::buffer_error, "Buffer.__dlpack__: DLPack has no type for " + to_string(view));
  auto exported = std::make_unique<Export<Managed>>();
  exported->shape = buffer.dims;
  for (std::int64_t stride : buffer.byte_strides)
    exported->strides.push_back(stride * 8 / bits(view.dtype));
  void* data = view.data;
  if (copied) {
    exported->copy = std::make_unique<char[]>(view.nbytes() + 1);
    data = exported->copy.get();
    if (view.nbytes() != 0) std::memcpy(data, view.data, view.nbytes());
  } else {
    ++buffer.exports;
    exported->buffer = self.inc_ref().ptr();
  }
  Managed& managed = exported->managed;
  managed.tensor = {data,  device_of(buffer),      view.rank,
                    *type, exported->shape.data(), exported->strides.data(),
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
  if (!PyLong_Check(stream.ptr())) {
    refuse(nb::type_error, "Buffer.__dlpack__: stream: expected None or an int, got " +
                               std::string(nb::type_name(stream.type()).c_str()));
  }
  auto number = nb::cast<std::int64_t>(stream);
  if (number == 0 || number < -1) {
    refuse(nb::value_error,
           "Buffer.__dlpack__: stream: expected None, -1 (no waiting), 1 (the legacy default "
           "stream), 2 (the thread's default stream) or a stream's address, got " +
               std::to_string(number));
  }
  return number;
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
  std::uint64_t flags = copied ? dlpack::kCopied : buffer.readonly ? dlpack::kReadOnly : 0;
  return export_as<dlpack::ManagedTensorVersioned>(self, copied, flags);
}

// Zero copy also for an input and a consumer without a notion of read-only: for `arrays="torch"`,
// whose documentation says not to write.
nb::object dlpack_unchecked(nb::handle self) {
  const auto& buffer = nb::cast<const Buffer&>(self);
  buffer.check_alive();
  buffer.refuse_packed("__dlpack__");
  return export_as<dlpack::ManagedTensor>(self, /*copied=*/false);
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
nb::dict cuda_array_interface(Buffer& buffer) {
  buffer.check_alive();
  std::string type = to_string(buffer.view);
  if (!buffer.gpu) {
    refuse(nb::attribute_error, "Buffer.__cuda_array_interface__: " + type +
                                    " is on the CPU; use __array__ or __dlpack__");
  }
  // Types of ml_dtypes have names that say something else.
  if (format_of(buffer.view.dtype) == nullptr)
    refuse(nb::attribute_error,
           "Buffer.__cuda_array_interface__: it has no name for the elements of " + type +
               "; use __dlpack__");
  std::uintptr_t address = buffer.view.size() == 0 ? 0 : number_of(buffer.view.data);
  // Consumers don't say which stream they use; by default it is this one.
  buffer.default_streams |= 1u << 1;
  return dict_of("shape", buffer.shape(), "typestr", buffer.dtype().attr("str"), "data",
                 nb::make_tuple(address, buffer.readonly), "strides", nb::none(), "version", 3,
                 "stream", buffer.gpu->number());
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
