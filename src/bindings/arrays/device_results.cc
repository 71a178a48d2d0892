// See the header. DLPack is asked first, since it says which GPU an array is on and knows every
// type; CUDA's array interface serves libraries that have nothing else.
#include "bindings/arrays/device_results.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/arrays/dlpack.h"
#include "bindings/python/deferred.h"
#include "bindings/python/gil.h"
#include "cuda/completions.h"
#include "cuda/copies.h"
#include "cuda/driver.h"

namespace callgate::bindings {
namespace {

// An array on a GPU, by whatever protocol it came. Strides are in `stride_unit`s of bytes; none for
// a dense array.
struct Foreign {
  const void* data = nullptr;
  int ordinal = 0;
  std::string type;  // as NumPy names it
  std::vector<std::int64_t> shape;
  std::optional<std::vector<std::int64_t>> strides;
  std::int64_t stride_unit = 1;
  nb::object owner;  // keeps the memory

  bool empty() const { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }
  bool dense(std::int64_t item) const {
    if (!strides || empty()) return true;
    std::int64_t step = item / stride_unit;
    for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) {
      if (shape[axis] != 1 && (*strides)[axis] != step) return false;
    }
    return true;
  }
  std::string text() const { return type_text(type, shape); }
};

// The name of a DLPack type; empty for those that no array of XLA's has.
std::string type_name(const dlpack::DataType& type) {
  for (int code = 1; code < static_cast<int>(kDTypeTableSize); ++code) {
    auto dtype = dtype_from_code(code);
    auto known = dtype ? dlpack::data_type(*dtype) : std::nullopt;
    if (known && known->code == type.code && known->bits == type.bits && type.lanes == 1)
      return std::string(name(*dtype));
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
  return method(nb::arg("stream") = stream);  // of before DLPack's version 1
}

const dlpack::Tensor& tensor_of(nb::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->major == 1) return managed->tensor;
    throw nb::buffer_error(("DLPack: expected version 0 or 1, got " +
                            std::to_string(managed->major) + "." + std::to_string(managed->minor))
                               .c_str());
  }
  auto* managed =
      static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) nb::raise_python_error();
  return managed->tensor;
}

// Empty for arrays that are not on a GPU.
std::optional<Foreign> by_dlpack(nb::handle value, const DeviceCall& call) {
  if (!nb::hasattr(value, "__dlpack_device__") || !nb::hasattr(value, "__dlpack__")) return {};
  nb::object where = value.attr("__dlpack_device__")();
  auto type = nb::cast<int>(nb::int_(where[0]));
  if (type != dlpack::kCuda && type != dlpack::kCudaManaged) return {};
  Foreign array;
  // The capsule is not consumed: as it dies, so does its hold on the memory.
  array.owner = capsule_of(value, call);
  const dlpack::Tensor& tensor = tensor_of(array.owner);
  auto rank = static_cast<std::size_t>(tensor.ndim);
  array.data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  // Managed memory is every GPU's.
  array.ordinal = type == dlpack::kCuda ? tensor.device.id : call.device->ordinal();
  array.type = type_name(tensor.dtype);
  array.shape.assign(tensor.shape, tensor.shape + rank);
  if (tensor.strides != nullptr) array.strides.emplace(tensor.strides, tensor.strides + rank);
  array.stride_unit = std::max(tensor.dtype.bits / 8, 1);
  return array;
}

int ordinal_of(const void* data) {
  int ordinal = 0;
  cuda::check(cuda::driver().pointer_attribute(&ordinal, cuda::PointerAttribute::kDeviceOrdinal,
                                               cuda::address(data)),
              "cuPointerGetAttribute");
  return ordinal;
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
std::optional<Foreign> by_array_interface(nb::handle value, const DeviceCall& call) {
  if (!nb::hasattr(value, "__cuda_array_interface__")) return {};
  nb::object interface = value.attr("__cuda_array_interface__");
  auto entry = [&](const char* key) { return nb::object(interface.attr("get")(key)); };
  if (!entry("mask").is_none())
    throw nb::type_error(
        "__cuda_array_interface__: expected an array without a mask, got one with");
  Foreign array;
  array.owner = nb::borrow(value);
  array.data = reinterpret_cast<const void*>(nb::cast<std::uintptr_t>(interface["data"][0]));
  for (nb::handle extent : interface["shape"])
    array.shape.push_back(nb::cast<std::int64_t>(extent));
  if (nb::object strides = entry("strides"); !strides.is_none()) {
    array.strides.emplace();
    for (nb::handle stride : strides) array.strides->push_back(nb::cast<std::int64_t>(stride));
  }
  nb::object dtype = nb::module_::import_("numpy").attr("dtype")(interface["typestr"]);
  array.type = nb::cast<std::string>(nb::str(nb::object(dtype.attr("name"))));
  array.ordinal = array.empty() ? call.device->ordinal() : ordinal_of(array.data);
  if (nb::object stream = entry("stream"); !stream.is_none() && !array.empty()) {
    auto number = nb::cast<std::int64_t>(stream);
    if (number == 0)
      throw nb::value_error("__cuda_array_interface__: stream: expected None or a stream, got 0");
    call.wait_for(number);
  }
  return array;
}

Stored copy_from_gpu(const ArrayView& target, Foreign array, const DeviceCall& call,
                     CopySources& sources, std::string& got) {
  got = array.text();
  if (array.ordinal != call.device->ordinal()) {
    got += " on cuda:" + std::to_string(array.ordinal) +
           " (the program's GPU is cuda:" + std::to_string(call.device->ordinal()) + ")";
    return Stored::kMismatch;
  }
  if (!std::ranges::equal(array.shape, target.shape()) || array.type != name(target.dtype))
    return Stored::kMismatch;
  if (!array.dense(bits(target.dtype) / 8)) {
    got += " that is not dense and row-major: make it contiguous";
    return Stored::kMismatch;
  }
  // With an alias the callable may return the very memory that it was given.
  if (target.nbytes() == 0 || array.data == target.data) return Stored::kYes;
  without_gil([&] {
    cuda::copy_on_device(cuda::address(target.data), cuda::address(array.data), target.nbytes(),
                         call.stream);
  });
  sources.keep(std::move(array.owner));
  return Stored::kYes;
}

Stored copy_from_host(const ArrayView& target, PyObject* value, bool cast, const DeviceCall& call,
                      CopySources& sources, std::string& got) {
  cuda::PinnedBlock block =
      without_gil([&] { return cuda::PinnedBlock(std::max<std::size_t>(target.nbytes(), 1)); });
  ArrayView staged = target;
  staged.data = block.data();
  Stored stored = store(staged, value, cast);
  if (stored == Stored::kMismatch && !describe(value, got)) return Stored::kError;
  if (stored != Stored::kYes || target.nbytes() == 0) return stored;
  without_gil([&] {
    cuda::copy_to_device(cuda::address(target.data), block.data(), target.nbytes(), call.stream);
  });
  sources.keep(std::move(block));
  return Stored::kYes;
}

}  // namespace

CopySources::~CopySources() {
  if (kept_->objects.empty() && kept_->blocks.empty()) return;
  without_gil([&] {
    try {
      cuda::keep_until(*call_.device, call_.stream, kept_);
    } catch (const Error&) {  // no event: the device is lost, or close to it
      cuda::driver().stream_synchronize(call_.stream);
    }
  });
}

Stored store_on_device(const ArrayView& target, PyObject* value, bool cast, const DeviceCall& call,
                       CopySources& sources, std::string& got) try {
  std::optional<Foreign> array = running_python([&] { return by_dlpack(value, call); });
  if (!array) array = running_python([&] { return by_array_interface(value, call); });
  if (array) return copy_from_gpu(target, *std::move(array), call, sources, got);
  return copy_from_host(target, value, cast, call, sources, got);
} catch (nb::python_error& error) {
  error.restore();
  return Stored::kError;
} catch (nb::builtin_exception& error) {
  PyErr_SetString(PyExc_TypeError, error.what());
  return Stored::kError;
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return Stored::kError;
}

}  // namespace callgate::bindings
