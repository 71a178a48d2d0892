// See the header.
#include "cuda/kept_copies.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/error.h"
#include "cuda/completions.h"
#include "cuda/copies.h"
#include "cuda/driver.h"
#include "cuda/event.h"

namespace callgate::cuda {
namespace {

// What XLA expects of the memory of its programs' arguments.
constexpr std::size_t kKeptAlignment = 256;

}  // namespace

KeptCopies::KeptCopies(Device& device, Stream stream, std::span<const ArrayView> arrays)
    : device_(&device), stream_(stream), arrays_(arrays.begin(), arrays.end()) {
  dims_ = own_dims({arrays_});
  std::size_t bytes = 0;
  for (const ArrayView& view : arrays_) bytes += round_up(view.nbytes(), kKeptAlignment);
  memory_ = DeviceBlock(device, std::max<std::size_t>(bytes, 1));
  DevicePointer to = memory_.data();
  for (ArrayView& view : arrays_) {
    auto from = reinterpret_cast<DevicePointer>(view.data);
    view.data = reinterpret_cast<void*>(to);
    if (view.nbytes() == 0) continue;
    check(driver().copy_on_device(to, from, view.nbytes(), stream), "cuMemcpyDtoDAsync_v2");
    to += round_up(view.nbytes(), kKeptAlignment);
  }
}

KeptCopies::~KeptCopies() {
  if (memory_.data() == 0) return;
  // Where it can't wait the device is lost, and nothing more will run on it.
  static_cast<void>(free_later());
}

bool KeptCopies::free_later() noexcept try {
  auto kept = std::make_shared<DeviceBlock>(std::move(memory_));
  ContextScope current(*device_);
  return Completions::of(*device_).keep(StreamEvent(*device_, stream_), kept);
} catch (const std::exception&) {
  return false;
}

}  // namespace callgate::cuda
