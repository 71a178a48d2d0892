// See the header. The driver may make its caller wait for room in a stream's queue, and what
// empties the queue may need the GIL: so none of its calls here is made with it.
#include "bindings/arrays/device_call.h"

#include <functional>
#include <string_view>

#include "bindings/python/gil.h"
#include "cuda/copies.h"
#include "cuda/driver.h"

namespace callgate::bindings {
namespace {

cuda::Stream stream_of(std::int64_t number) {
  return reinterpret_cast<cuda::Stream>(static_cast<std::uintptr_t>(number));
}

}  // namespace

DeviceCall DeviceCall::of(const CallContext& context) {
  auto stream = static_cast<cuda::Stream>(context.stream);
  return {&cuda::Device::of(stream), stream};
}

std::uintptr_t DeviceCall::number() const noexcept {
  auto handle = reinterpret_cast<std::uintptr_t>(stream);
  return handle == 0 ? 1 : handle;
}

void DeviceCall::make_current() const {
  cuda::check(cuda::driver().context_set_current(device->context()), "cuCtxSetCurrent");
}

void DeviceCall::hold_back(std::int64_t consumer) const {
  if (static_cast<std::uintptr_t>(consumer) == number()) return;
  without_gil([&] { cuda::StreamEvent(*device, stream).hold_back(stream_of(consumer)); });
}

void DeviceCall::wait_for(std::int64_t producer) const {
  if (static_cast<std::uintptr_t>(producer) == number()) return;
  without_gil([&] { cuda::StreamEvent(*device, stream_of(producer)).hold_back(stream); });
}

bool capture_failed(const DeviceCall& call) {
  cuda::CaptureStatus status = cuda::CaptureStatus::kNone;
  cuda::Result result = cuda::driver().stream_is_capturing(call.stream, &status);
  if (result == cuda::Result::kStreamCaptureInvalidated) return true;
  cuda::check(result, "cuStreamIsCapturing");
  return status == cuda::CaptureStatus::kInvalidated;
}

std::vector<std::size_t> device_checksums(const DeviceCall& call,
                                          std::span<const ArrayView> arrays) {
  return without_gil([&] {
    cuda::HostCopies copies(*call.device, arrays, {});
    copies.fetch(call.stream);
    cuda::wait_for(*call.device, call.stream);
    std::vector<std::size_t> sums;
    for (const ArrayView& view : copies.operands()) sums.push_back(checksum(view));
    return sums;
  });
}

std::size_t checksum(const ArrayView& host_array) {
  return std::hash<std::string_view>()(
      {static_cast<const char*>(host_array.data), host_array.nbytes()});
}

}  // namespace callgate::bindings
