// An item of a feed on its way to a GPU. Made on the feed's thread, given on XLA's; both hold the
// GIL, and give it up for what the driver does.
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/device_call.h"
#include "bindings/arrays/views.h"
#include "bindings/bind.h"
#include "bindings/python/gil.h"
#include "core/error.h"
#include "cuda/copies.h"
#include "cuda/device.h"

namespace callgate::bindings {
namespace {

// The type of a NumPy array; its extents are the array's own.
ArrayView type_of(nb::handle object) {
  auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  if (!PyArray_Check(object.ptr())) throw nb::type_error("Upload: expected NumPy arrays");
  auto dtype = known_dtype(array);
  if (!dtype) throw nb::type_error("Upload: expected arrays of a dtype that JAX has");
  static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
  return {nullptr, reinterpret_cast<const std::int64_t*>(PyArray_DIMS(array)), PyArray_NDIM(array),
          *dtype};
}

class UploadHandle {
 public:
  UploadHandle(int ordinal, const nb::sequence& arrays) : ordinal_(ordinal) {
    std::vector<ArrayView> types;
    for (nb::handle array : arrays) types.push_back(type_of(array));
    without_gil(
        [&] { upload_ = std::make_shared<cuda::Upload>(cuda::Device::at(ordinal), types); });
    std::size_t index = 0;
    for (nb::handle array : arrays) {
      if (store(upload_->host()[index++], array.ptr(), /*cast=*/false) != Stored::kYes) {
        if (PyErr_Occurred() != nullptr) nb::raise_python_error();
        throw nb::type_error("Upload: expected arrays of the host");
      }
    }
    without_gil([&] { upload_->start(); });
  }
  UploadHandle(UploadHandle&&) = default;
  ~UploadHandle() {
    if (upload_ != nullptr) without_gil([&] { upload_.reset(); });
  }

  int ordinal() const noexcept { return ordinal_; }

  // Lane `lane` of `lanes` of each result.
  void give(const nb::sequence& results, std::size_t lane, std::size_t lanes) {
    const DeviceCall* call = DeviceCallScope::current();
    if (call == nullptr || call->device != &upload_->device())
      throw nb::value_error("Upload.give: expected a call on the GPU that it was made for");
    std::vector<void*> targets;
    for (nb::handle result : results) {
      const ArrayView& view = nb::cast<const Buffer&>(result).view();
      std::size_t bytes = view.nbytes() / lanes;
      targets.push_back(static_cast<char*>(view.data) + lane * bytes);
      if (targets.size() > upload_->host().size() ||
          bytes != upload_->host()[targets.size() - 1].nbytes()) {
        throw nb::value_error("Upload.give: expected results of the arrays' types");
      }
    }
    without_gil([&] { cuda::Upload::give(upload_, targets, call->stream); });
  }

 private:
  int ordinal_;
  std::shared_ptr<cuda::Upload> upload_;
};

}  // namespace

void bind_upload(nb::module_& module) {
  nb::class_<UploadHandle>(module, "Upload",
                           "Arrays of the host on their way to a GPU, by way of pinned memory.")
      .def(nb::init<int, const nb::sequence&>(), nb::arg("ordinal"), nb::arg("arrays"))
      .def_prop_ro("ordinal", &UploadHandle::ordinal, "The GPU's number for CUDA.")
      .def("give", &UploadHandle::give, nb::arg("results"), nb::arg("lane") = 0,
           nb::arg("lanes") = 1,
           "Has the stream of the call that runs on this thread copy them to its results.");
}

}  // namespace callgate::bindings
