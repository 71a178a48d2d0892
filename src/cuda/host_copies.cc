// See the header.
#include "cuda/host_copies.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "cuda/completions.h"
#include "cuda/copies.h"
#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

constexpr std::size_t kHostAlignment = 64;

DevicePointer address(const void* data) { return reinterpret_cast<DevicePointer>(data); }

}  // namespace

HostCopies::HostCopies(Device& device, std::span<const ArrayView> operands,
                       std::span<const ArrayView> results)
    : device_(&device),
      operands_(operands.begin(), operands.end()),
      results_(results.begin(), results.end()) {
  dims_ = own_dims({operands_, results_});
  std::size_t bytes = 0;
  std::vector<std::size_t> operand_at, result_at;
  for (const ArrayView& view : operands_) {
    sources_.push_back(address(view.data));
    operand_at.push_back(bytes);
    bytes += round_up(view.nbytes(), kHostAlignment);
  }
  operand_bytes_ = bytes;
  for (const ArrayView& view : results_) {
    targets_.push_back(address(view.data));
    std::size_t shared = shared_with(view);
    result_at.push_back(shared < operand_at.size() ? operand_at[shared] : bytes);
    if (shared == operand_at.size()) bytes += round_up(view.nbytes(), kHostAlignment);
  }
  memory_ = PinnedBlock(std::max<std::size_t>(bytes, 1));
  for (std::size_t i = 0; i < operands_.size(); ++i)
    operands_[i].data = memory_.data() + operand_at[i];
  for (std::size_t i = 0; i < results_.size(); ++i)
    results_[i].data = memory_.data() + result_at[i];
}

// The operand that has the result's memory; their number for none.
std::size_t HostCopies::shared_with(const ArrayView& result) const {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i] == address(result.data) && operands_[i].nbytes() == result.nbytes() &&
        result.nbytes() != 0) {
      return i;
    }
  }
  return sources_.size();
}

void HostCopies::fetch(Stream stream) {
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    std::size_t bytes = operands_[i].nbytes();
    if (bytes == 0) continue;
    check(driver().copy_to_host(operands_[i].data, sources_[i], bytes, stream),
          "cuMemcpyDtoHAsync_v2");
  }
}

StreamEvent HostCopies::fetch_aside(Stream stream) {
  if (operand_bytes_ == 0) return {*device_, stream};
  aside_ = DeviceBlock(*device_, operand_bytes_);
  auto offset = [this](std::size_t i) {
    return static_cast<std::size_t>(static_cast<char*>(operands_[i].data) - memory_.data());
  };
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    if (operands_[i].nbytes() == 0) continue;
    check(driver().copy_on_device(aside_.data() + offset(i), sources_[i], operands_[i].nbytes(),
                                  stream),
          "cuMemcpyDtoDAsync_v2");
  }
  Stream side = side_stream(*device_, Direction::kToHost);
  StreamEvent(*device_, stream).hold_back(side);
  // One copy for all: operands lie in both as they lie in the other.
  check(driver().copy_to_host(memory_.data(), aside_.data(), operand_bytes_, side),
        "cuMemcpyDtoHAsync_v2");
  return {*device_, side};
}

void HostCopies::publish(Stream stream) {
  for (std::size_t i = 0; i < results_.size(); ++i) {
    std::size_t bytes = results_[i].nbytes();
    if (bytes == 0) continue;
    check(driver().copy_to_device(targets_[i], results_[i].data, bytes, stream),
          "cuMemcpyHtoDAsync_v2");
  }
}

void keep_until(Device& device, Stream stream, const std::shared_ptr<void>& kept) {
  StreamEvent end(device, stream);
  if (Completions::of(device).after(std::move(end), [kept](Result) {})) return;
  driver().stream_synchronize(stream);  // nobody is there any more who would wait
}

void poison_on_device(const ArrayView& view, Stream stream) {
  if (view.nbytes() == 0) return;
  unsigned char bits = is_inexact(view.dtype) ? 0xFF : 0;
  check(driver().set_8(address(view.data), bits, view.nbytes(), stream), "cuMemsetD8Async");
}

void clear_on_device(const ArrayView& view, Stream stream) {
  if (view.nbytes() == 0) return;
  check(driver().set_8(address(view.data), 0, view.nbytes(), stream), "cuMemsetD8Async");
}

}  // namespace callgate::cuda
