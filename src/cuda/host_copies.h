// A call's device arrays as host arrays, in pinned memory.
//
// The copies are enqueued on the stream; who reads the views waits for the stream first. Results
// are room of the host's that `publish` copies to the device. Blocks live until the copies that use
// them have ended: `publish` takes care of its own.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/call.h"
#include "cuda/device.h"
#include "cuda/event.h"
#include "cuda/memory.h"

namespace callgate::cuda {

class HostCopies {
 public:
  // `dims` of the views given may die; those here have their own. Results that share memory with an
  // operand on the device do so here. Throws Error. The device's context is current.
  HostCopies(Device& device, std::span<const ArrayView> operands,
             std::span<const ArrayView> results);

  // Enqueues the copies of the operands to the host. Throws Error.
  void fetch(Stream stream);
  // The same by way of device memory of ours and a stream of ours, for large arrays: `stream` goes
  // on after a copy on the device. The event is the end of the copies.
  StreamEvent fetch_aside(Stream stream);

  std::span<const ArrayView> operands() const noexcept { return operands_; }
  std::span<ArrayView> results() noexcept { return results_; }
  std::size_t operand_bytes() const noexcept { return operand_bytes_; }

  // Enqueues the copies of the results to the device. Throws Error.
  void publish(Stream stream);

 private:
  std::size_t shared_with(const ArrayView& result) const;

  Device* device_;
  std::vector<ArrayView> operands_, results_;
  std::vector<DevicePointer> sources_, targets_;  // of each
  std::vector<std::int64_t> dims_;
  std::size_t operand_bytes_ = 0;
  PinnedBlock memory_;
  DeviceBlock aside_;
};

// Keeps something until the stream is done with what it has been given so far. Throws Error.
void keep_until(Device& device, Stream stream, const std::shared_ptr<void>& kept);

// NaN, or zero in integers, as core's poison() leaves them; and zeros. Enqueued. Throw Error.
void poison_on_device(const ArrayView& view, Stream stream);
void clear_on_device(const ArrayView& view, Stream stream);

}  // namespace callgate::cuda
