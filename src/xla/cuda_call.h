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
                    cuda::Stream stream) {
    if (number.data == nullptr) [[likely]]
      return -1;
    std::atomic<std::int32_t>& known = known_[device.index()];
    // Relaxed: a number that stands for itself; two threads may both read it.
    if (std::int32_t value = known.load(std::memory_order_relaxed)) return value - 1;
    if (cuda::capturing(stream))
      throw Error(ErrorCode::kInternal,
                  "a call on shards was captured into a CUDA graph before its partition was known");
    cuda::PinnedBlock memory(number.nbytes());
    cuda::copy_to_host(memory.data(), cuda::address(number.data), number.nbytes(), stream);
    cuda::wait_for(device, stream);
    std::int32_t shard = shards.read(memory.data());
    known.store(shard + 1, std::memory_order_relaxed);  // as above
    return shard;
  }

 private:
  // By ordinal: the partition plus one; 0 while it is not known.
  std::array<std::atomic<std::int32_t>, cuda::kMostDevices> known_{};
};

// What XLA owns for a site of a gate; the handlers are in gate.cc.
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

  CudaCall(CudaSite& of, const XLA_FFI_CallFrame& frame)
      : site(of),
        decoded(frame),
        number(of.call_site->shards.take_operand(decoded)),
        lane(take_lane_operand(of, decoded)),
        stream(static_cast<cuda::Stream>(decode_stream(frame))),
        device(cuda::Device::of(stream)),
        context(decode_context(frame)) {
    context.device = static_cast<std::int32_t>(device.id());
    context.stream = stream;
  }

  const CallSite& call_site() const { return *site.call_site; }
  Callee& callee() const { return *site.call_site->callee; }
  bool sharded() const { return number.data != nullptr; }
  Call call() { return {decoded.operands(), decoded.results(), context}; }

  static ArrayView take_lane_operand(const CudaSite& of, DecodedCall& call) {
    if (!of.call_site->numbered) return {};
    const ArrayView number = lane_operand(call.operands());
    call.drop_last_operand();
    return number;
  }

  // `sent`, and behind them the numbers of the lane and the partition where there are any.
  std::vector<ArrayView> with_numbers(std::span<const ArrayView> sent) const {
    std::vector<ArrayView> operands(sent.begin(), sent.end());
    if (lane.data != nullptr) operands.push_back(lane);
    if (sharded()) operands.push_back(number);
    return operands;
  }
};

// A call's arrays on the host, and where it runs.
struct CopiedCall {
  std::shared_ptr<CallSite> site;
  cuda::HostCopies copies;
  CallContext context;
  bool sharded;

  // `for_keeping`: see HostCopies.
  CopiedCall(const CudaCall& call, std::span<const ArrayView> operands,
             std::span<const ArrayView> results, bool for_keeping = false)
      : site(call.site.call_site),
        copies(call.device, call.with_numbers(operands), results, for_keeping),
        context(call.context),
        sharded(call.sharded()) {}

  // Once the copies are there: the call; the numbers go into its context.
  Call call() {
    std::span<const ArrayView> operands = copies.operands();
    if (sharded) {
      context.shard = site->shards.read(operands.back().data);
      operands = operands.first(operands.size() - 1);
    }
    Call made{operands, copies.results(), context};
    if (site->numbered) take_lane(made);
    return made;
  }
  // After call(): whether this device makes it.
  bool runs() const { return site->shards.runs(context.shard); }
};

// Makes a call, `run`: see settled(). What the driver says of it has the callee's name.
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
