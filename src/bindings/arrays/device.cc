// SPDX-License-Identifier: Apache-2.0
// Buffers and results on a GPU. The driver may block its caller until a stream's queue has room,
// and the work that empties the queue may need the GIL. So no driver call here holds the GIL.
//
// DLPack comes first for results, because it names the array's GPU and supports every type. CUDA's
// array interface serves libraries without DLPack.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/results.h"
#include "core/error.h"
#include "cuda/copies.h"

namespace callgate::bindings {
namespace {

// An array on a GPU, from any protocol.
struct Foreign {
  const char* data = nullptr;
  int ordinal = 0;
  std::string type;                          // NumPy's name
  std::vector<std::int64_t> shape, strides;  // strides in bytes; none if dense
  nb::object owner;                          // keeps the memory alive

  bool empty() const { return std::ranges::count(shape, 0) != 0; }
  bool dense(std::int64_t step) const {
    if (strides.empty() || empty()) return true;
    for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis])
      if (shape[axis] != 1 && strides[axis] != step) return false;
    return true;
  }
};

// The name of a DLPack type, for messages about types that XLA lacks.
std::string type_name(const dlpack::DataType& type) {
  for (int code = 1; code < static_cast<int>(kDTypeTableSize); ++code) {
    auto dtype = dtype_from_code(code);
    if (dtype && dlpack::data_type(*dtype) == type) return std::string(name(*dtype));
  }
  return "DLPack type " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits";
}

nb::object capsule_of(nb::handle value, const DeviceCall& call) {
  nb::object method = value.attr("__dlpack__");
  nb::int_ stream(call.number());
  try {
    return method(nb::arg("stream") = stream, nb::arg("max_version") = nb::make_tuple(1, 0));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method(nb::arg("stream") = stream);  // before DLPack's version 1
}

const dlpack::Tensor& tensor_of(nb::handle capsule) {
  using dlpack::ManagedTensor, dlpack::ManagedTensorVersioned;
  const bool versioned = PyCapsule_IsValid(capsule.ptr(), ManagedTensorVersioned::kName) != 0;
  void* content = PyCapsule_GetPointer(
      capsule.ptr(), versioned ? ManagedTensorVersioned::kName : ManagedTensor::kName);
  if (content == nullptr) nb::raise_python_error();
  if (!versioned) return static_cast<ManagedTensor*>(content)->tensor;
  const auto& of = *static_cast<ManagedTensorVersioned*>(content);
  if (of.major == 1) return of.tensor;
  raise(PyExc_TypeError, "DLPack: expected version 0 or 1, got " + std::to_string(of.major) + "." +
                             std::to_string(of.minor));
}

// Empty for arrays that are not on a GPU.
std::optional<Foreign> by_dlpack(nb::handle value, const DeviceCall& call) {
  if (!nb::hasattr(value, "__dlpack_device__") || !nb::hasattr(value, "__dlpack__")) return {};
  nb::object where = value.attr("__dlpack_device__")();
  auto type = nb::cast<int>(nb::int_(where[0]));
  if (type != dlpack::kCuda && type != dlpack::kCudaManaged) return {};
  Foreign array;
  // The capsule is not consumed; its destruction releases the memory.
  array.owner = capsule_of(value, call);
  const dlpack::Tensor& tensor = tensor_of(array.owner);
  auto rank = static_cast<std::size_t>(tensor.ndim);
  array.data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  // Managed memory belongs to every GPU.
  array.ordinal = type == dlpack::kCuda ? tensor.device.device_id : call.device->ordinal();
  array.type = type_name(tensor.dtype);
  array.shape.assign(tensor.shape, tensor.shape + rank);
  if (tensor.strides != nullptr) array.strides.assign(tensor.strides, tensor.strides + rank);
  for (std::int64_t& stride : array.strides) stride *= std::max(tensor.dtype.bits / 8, 1);
  return array;
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
std::optional<Foreign> by_array_interface(nb::handle value, const DeviceCall& call) {
  if (!nb::hasattr(value, "__cuda_array_interface__")) return {};
  nb::object interface = value.attr("__cuda_array_interface__");
  auto entry = [&](const char* key) { return nb::object(interface.attr("get")(key)); };
  if (!entry("mask").is_none())
    raise(PyExc_TypeError,
          "__cuda_array_interface__: expected an array without a mask, got one with");
  Foreign array;
  array.owner = nb::borrow(value);
  array.data = reinterpret_cast<const char*>(nb::cast<std::uintptr_t>(interface["data"][0]));
  array.shape = nb::cast<std::vector<std::int64_t>>(interface["shape"]);
  if (nb::object strides = entry("strides"); !strides.is_none())
    array.strides = nb::cast<std::vector<std::int64_t>>(strides);
  nb::object dtype = nb::module_::import_("numpy").attr("dtype")(interface["typestr"]);
  array.type = nb::cast<std::string>(nb::str(nb::object(dtype.attr("name"))));
  array.ordinal = call.device->ordinal();
  if (array.empty()) return array;
  cuda::check(
      cuda::driver().pointer_attribute(&array.ordinal, cuda::PointerAttribute::kDeviceOrdinal,
                                       cuda::address(array.data)),
      "cuPointerGetAttribute");
  if (nb::object stream = entry("stream"); !stream.is_none()) {
    auto number = nb::cast<std::int64_t>(stream);
    if (number == 0)
      raise(PyExc_TypeError, "__cuda_array_interface__: stream: expected None or a stream, got 0");
    call.wait_for(number);
  }
  return array;
}

std::optional<std::string> copy_from_gpu(const ArrayView& target, Foreign array,
                                         CopySources& sources) {
  const DeviceCall& call = sources.call;
  std::string got = type_text(array.type, array.shape);
  if (array.ordinal != call.device->ordinal())
    return got + " on cuda:" + std::to_string(array.ordinal) +
           " (the program's GPU is cuda:" + std::to_string(call.device->ordinal()) + ")";
  if (!std::ranges::equal(array.shape, target.shape()) || array.type != name(target.dtype))
    return got;
  if (!array.dense(bits(target.dtype) / 8))
    return got + " that is not dense and row-major; make it contiguous";
  // With an alias, the callable may return the memory that it was given.
  if (target.nbytes() == 0 || array.data == target.data) return std::nullopt;
  without_gil([&] {
    cuda::copy_on_device(cuda::address(target.data), cuda::address(array.data), target.nbytes(),
                         call.stream);
  });
  auto has_it = [&](const ArrayView& view) {
    const auto* first = static_cast<const char*>(view.data);
    return array.data >= first && array.data < first + view.nbytes();
  };
  if (std::ranges::none_of(sources.of_xla, has_it))
    sources.kept->objects.push_back(late(std::move(array.owner)));
  return std::nullopt;
}

std::optional<std::string> copy_from_host(const ArrayView& target, PyObject* value, bool cast,
                                          CopySources& sources) {
  cuda::PinnedBlock block = without_gil([&] { return cuda::PinnedBlock(target.nbytes()); });
  ArrayView staged = target;
  staged.data = block.data();
  if (auto came = store(staged, value, cast)) return came;
  if (target.nbytes() == 0) return std::nullopt;
  without_gil([&] {
    cuda::copy_to_device(cuda::address(target.data), block.data(), target.nbytes(),
                         sources.call.stream);
  });
  sources.kept->blocks.push_back(std::move(block));
  return std::nullopt;
}

}  // namespace

std::vector<std::size_t> checksums(std::span<const ArrayView> arrays, const DeviceCall* on_gpu) {
  std::vector<std::size_t> sums;
  auto add = [&](std::span<const ArrayView> on_host) {
    for (const ArrayView& view : on_host)
      sums.push_back(
          std::hash<std::string_view>()({static_cast<const char*>(view.data), view.nbytes()}));
  };
  if (on_gpu == nullptr) {
    add(arrays);
    return sums;
  }
  without_gil([&] {
    cuda::HostCopies copies(*on_gpu->device, arrays, {});
    copies.fetch(on_gpu->stream);
    cuda::wait_for(*on_gpu->device, on_gpu->stream);
    add(copies.operands());
  });
  return sums;
}

CopySources::~CopySources() {
  if (kept->objects.empty() && kept->blocks.empty()) return;
  without_gil([&] {
    try {
      cuda::keep_until(*call.device, call.stream, kept);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it has waited for the stream itself
    }
  });
}

std::optional<std::string> store_on_device(const ArrayView& target, PyObject* value, bool cast,
                                           CopySources& sources) try {
  const DeviceCall& call = sources.call;
  std::optional<Foreign> array = running_python([&] { return by_dlpack(value, call); });
  if (!array) array = running_python([&] { return by_array_interface(value, call); });
  return array ? copy_from_gpu(target, *std::move(array), sources)
               : copy_from_host(target, value, cast, sources);
} catch (const nb::cast_error&) {
  raise(PyExc_TypeError,
        "result: expected an array on a GPU, got one whose interface describes it wrongly");
}

// --- Upload --------------------------------------------------------------------------------------

namespace {

// An item of a feed on its way to a GPU. Created on the feed's thread, delivered on XLA's.
struct UploadHandle : Immovable {
  UploadHandle(int ordinal, const nb::sequence& arrays) {
    std::vector<ArrayView> types;
    for (nb::handle array : arrays) {
      std::optional<ArrayView> type = known_view(array);
      if (!type) raise(PyExc_TypeError, "Upload: expected NumPy arrays of a dtype of JAX");
      types.push_back(*type);  // its data is not read
    }
    without_gil([&] { upload = std::make_shared<cuda::Upload>(cuda::Device::at(ordinal), types); });
    std::size_t index = 0;
    for (nb::handle array : arrays)
      if (store(upload->host()[index++], array.ptr(), /*cast=*/false))
        raise(PyExc_TypeError, "Upload: expected arrays in host memory");
    without_gil([&] { upload->start(); });
  }
  ~UploadHandle() {
    without_gil([&] { upload.reset(); });
  }

  // Lane `lane` of `lanes` of each result.
  void give(const nb::sequence& results, std::size_t lane, std::size_t lanes) {
    const DeviceCall* call = DeviceCallScope::current_;
    if (call == nullptr || call->device != &upload->device())
      raise(PyExc_ValueError, "Upload.give: expected a call on the GPU that it was made for");
    std::vector<void*> targets;
    for (nb::handle result : results) {
      const ArrayView& view = nb::cast<const Buffer&>(result).view;
      std::size_t bytes = view.nbytes() / lanes;
      targets.push_back(static_cast<char*>(view.data) + lane * bytes);
      if (targets.size() > upload->host().size() ||
          bytes != upload->host()[targets.size() - 1].nbytes())
        raise(PyExc_ValueError, "Upload.give: expected results of the arrays' types");
    }
    without_gil([&] { cuda::Upload::give(upload, targets, call->stream); });
  }

  std::shared_ptr<cuda::Upload> upload;
};

}  // namespace

void bind_upload(nb::module_& module) {
  nb::class_<UploadHandle>(module, "Upload",
                           "Host arrays on their way to a GPU, through pinned memory.")
      .def(nb::init<int, const nb::sequence&>(), nb::arg("ordinal"), nb::arg("arrays"))
      .def_prop_ro(
          "ordinal", [](const UploadHandle& of) { return of.upload->device().ordinal(); },
          "The GPU's number in CUDA.")
      .def("give", &UploadHandle::give, nb::arg("results"), nb::arg("lane") = 0,
           nb::arg("lanes") = 1,
           "Makes the stream of this thread's running call copy the arrays to the call's results.");
}

}  // namespace callgate::bindings
