// See the header.
#include "cuda/copies.h"

#include <array>
#include <mutex>

#include "cuda/driver.h"

namespace callgate::cuda {

std::vector<std::int64_t> own_dims(std::initializer_list<std::span<ArrayView>> groups) {
  std::size_t rank = 0;
  for (std::span<ArrayView> views : groups) {
    for (const ArrayView& view : views) rank += static_cast<std::size_t>(view.rank);
  }
  std::vector<std::int64_t> dims;
  dims.reserve(rank);  // views point into it
  for (std::span<ArrayView> views : groups) {
    for (ArrayView& view : views) {
      std::size_t at = dims.size();
      dims.insert(dims.end(), view.dims, view.dims + view.rank);
      view.dims = dims.data() + at;
    }
  }
  return dims;
}

Stream side_stream(const Device& device, Direction direction) {
  static auto* mutex = new std::mutex();
  static auto* streams = new std::array<std::array<Stream, 2>, 64>();
  std::lock_guard lock(*mutex);
  Stream& stream =
      (*streams)[static_cast<std::size_t>(device.ordinal())][static_cast<std::size_t>(direction)];
  if (stream == nullptr)
    check(driver().stream_create(&stream, kStreamNonBlocking), "cuStreamCreate");
  return stream;
}

}  // namespace callgate::cuda
