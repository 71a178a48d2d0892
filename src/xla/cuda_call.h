// SPDX-License-Identifier: Apache-2.0
// One call on a GPU's arrays, with the data for all ways to make it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/array_view.h"
#include "core/error.h"
#include "cuda/copies.h"
#include "cuda/device.h"
#include "xla/call_site.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// The partition of a device in a program. It never changes for an executable on a device. A call
// site that needs it before its operands are on the host reads it from the device's memory at its
// first call there, which waits for the stream.
class DeviceShards {
 public:
  // `number` comes from Shards::take_operand. Returns -1 for a call on whole arrays. Throws Error.
  std::int32_t read(const Shards& shards, const ArrayView& number, cuda::Device& device,
                    cuda::Stream stream);

 private:
  // By ordinal: the partition plus one; 0 while unknown.
  std::array<std::atomic<std::int32_t>, cuda::kMostDevices> known_{};
};

// XLA's state for a site of a gate; gate.cc has the handlers.
struct CudaSite {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.cuda_gate_state";
  static std::unique_ptr<CudaSite> make(const XLA_FFI_Attrs& attributes) {
    return std::make_unique<CudaSite>(make_call_site(attributes));
  }
  static void execute(XLA_FFI_CallFrame* frame);

  std::shared_ptr<CallSite> call_site;
  DeviceShards shards;
  std::mutex mutex;
  // Replayed calls of graphs that can't keep them themselves.
  std::vector<std::shared_ptr<void>> captured;
};

struct CudaCall {
  CudaSite& site;
  DecodedCall decoded;
  ArrayView number;  // of the partition; without data if there is none
  ArrayView lane;    // of the lane, as above
  cuda::Stream stream;
  cuda::Device& device;
  CallContext context;

  CudaCall(CudaSite& of, const XLA_FFI_CallFrame& frame);

  const CallSite& call_site() const { return *site.call_site; }
  Callee& callee() const { return *site.call_site->callee; }
  bool sharded() const { return number.data != nullptr; }
  Call call() { return {decoded.operands(), decoded.results(), context}; }

  static ArrayView take_lane_operand(const CudaSite& of, DecodedCall& call);

  // `sent`, followed by the numbers of the lane and the partition, if there are any.
  std::vector<ArrayView> with_numbers(std::span<const ArrayView> sent) const;
};

// A call's arrays on the host, and its place.
struct CopiedCall {
  std::shared_ptr<CallSite> site;
  cuda::HostCopies copies;
  CallContext context;
  bool sharded;

  // `for_keeping`: see HostCopies.
  CopiedCall(const CudaCall& call, std::span<const ArrayView> operands,
             std::span<const ArrayView> results, bool for_keeping = false);

  // The call, after the copies; puts the numbers into its context.
  Call call();
  // After call(): true if this device makes the call.
  bool runs() const { return site->shards.runs(context.shard); }
};

// Makes a call, `run`: see settled(). Adds the callee's name to the driver's errors.
template <typename Run>
void settled_on_device(const XLA_FFI_CallFrame& frame, bool poison_on_error, Callee& callee,
                       Run&& run) {
  // Marks the results of a failed call.
  auto poison = [&] {
    DecodedCall decoded(frame);
    auto* stream = static_cast<cuda::Stream>(decode_stream(frame));
    std::optional<cuda::ContextScope> current;
    guarded([&] { current.emplace(cuda::Device::of(stream)); },
            [](const Error&) {});  // XLA's own context works then
    cuda::poison_on_device(decoded.results(), stream);
  };
  settled(poison_on_error, callee, [&] { cuda::named(callee.name(), run); }, poison);
}

// OnDevice::kDeferred, in cuda_deferred.cc; gate.cc has the other ways. Throws Error.
void run_deferred(CudaCall& call);

}  // namespace callgate::xla_ffi
