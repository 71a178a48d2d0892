// SPDX-License-Identifier: Apache-2.0
// One call whose arrays are a GPU's, with all that the ways to make it need.
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

// The partition that a device has in a program. It never changes for an executable on a device, so
// a call site that needs it before its operands are on the host reads it from the device's memory
// at its first call there, which waits for the stream.
class DeviceShards {
 public:
  // `number`: what Shards::take_operand gave. -1 for a call on whole arrays. Throws Error.
  std::int32_t read(const Shards& shards, const ArrayView& number, cuda::Device& device,
                    cuda::Stream stream);

 private:
  // By ordinal: the partition plus one; 0 while it is not known.
  std::array<std::atomic<std::int32_t>, cuda::kMostDevices> known_{};
};

// XLA's state for a site of a gate; the handlers are in gate.cc.
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
  ArrayView number;  // of the partition; no data where there is none
  ArrayView lane;    // the number of the lane, likewise
  cuda::Stream stream;
  cuda::Device& device;
  CallContext context;

  CudaCall(CudaSite& of, const XLA_FFI_CallFrame& frame);

  const CallSite& call_site() const { return *site.call_site; }
  Callee& callee() const { return *site.call_site->callee; }
  bool sharded() const { return number.data != nullptr; }
  Call call() { return {decoded.operands(), decoded.results(), context}; }

  static ArrayView take_lane_operand(const CudaSite& of, DecodedCall& call);

  // `sent`, and behind them the numbers of the lane and the partition where there are any.
  std::vector<ArrayView> with_numbers(std::span<const ArrayView> sent) const;
};

// A call's arrays on the host, and where it runs.
struct CopiedCall {
  std::shared_ptr<CallSite> site;
  cuda::HostCopies copies;
  CallContext context;
  bool sharded;

  // `for_keeping`: see HostCopies.
  CopiedCall(const CudaCall& call, std::span<const ArrayView> operands,
             std::span<const ArrayView> results, bool for_keeping = false);

  // Once the copies are there: the call; the numbers go into its context.
  Call call();
  // After call(): whether this device makes it.
  bool runs() const { return site->shards.runs(context.shard); }
};

// Makes a call, `run`: see settled(). The driver's errors get the callee's name.
template <typename Run>
void settled_on_device(const XLA_FFI_CallFrame& frame, bool poison_on_error, Callee& callee,
                       Run&& run) {
  // Marks the results, wherever the call failed.
  auto poison = [&] {
    DecodedCall decoded(frame);
    auto* stream = static_cast<cuda::Stream>(decode_stream(frame));
    std::optional<cuda::ContextScope> current;
    guarded([&] { current.emplace(cuda::Device::of(stream)); },
            [](const Error&) {});  // XLA's own context will do, then
    cuda::poison_on_device(decoded.results(), stream);
  };
  settled(poison_on_error, callee, [&] { cuda::named(callee.name(), run); }, poison);
}

// OnDevice::kDeferred, in cuda_deferred.cc; the other ways are in cuda_gate.cc. Throws Error.
void run_deferred(CudaCall& call);

}  // namespace callgate::xla_ffi
