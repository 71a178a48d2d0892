// SPDX-License-Identifier: Apache-2.0
// A call of a CUDA program: its operands, and their copies.
#include "xla/cuda_call.h"

namespace callgate::xla_ffi {

std::int32_t DeviceShards::read(const Shards& shards, const ArrayView& number, cuda::Device& device,
                                cuda::Stream stream) {
  if (number.data == nullptr) [[likely]]
    return -1;
  std::atomic<std::int32_t>& known = known_[device.index()];
  // Relaxed: a number on its own; two threads may both read it.
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

CudaCall::CudaCall(CudaSite& of, const XLA_FFI_CallFrame& frame)
    : site(of),
      decoded(frame, of.call_site->marked),
      number(of.call_site->shards.take_operand(decoded)),
      lane(take_lane_operand(of, decoded)),
      stream(static_cast<cuda::Stream>(decode_stream(frame))),
      device(cuda::Device::of(stream)),
      context(decode_context(frame)) {
  context.device = static_cast<std::int32_t>(device.id());
  context.stream = stream;
}

ArrayView CudaCall::take_lane_operand(const CudaSite& of, DecodedCall& call) {
  if (!of.call_site->numbered) return {};
  const ArrayView number = lane_operand(call.operands());
  call.drop_last_operand();
  return number;
}

std::vector<ArrayView> CudaCall::with_numbers(std::span<const ArrayView> sent) const {
  std::vector<ArrayView> operands(sent.begin(), sent.end());
  if (lane.data != nullptr) operands.push_back(lane);
  if (sharded()) operands.push_back(number);
  return operands;
}

CopiedCall::CopiedCall(const CudaCall& call, std::span<const ArrayView> operands,
                       std::span<const ArrayView> results, bool for_keeping)
    : site(call.site.call_site),
      copies(call.device, call.with_numbers(operands), results, for_keeping),
      context(call.context),
      sharded(call.sharded()) {}

Call CopiedCall::call() {
  std::span<const ArrayView> operands = copies.operands();
  if (sharded) {
    context.shard = site->shards.read(operands.back().data);
    operands = operands.first(operands.size() - 1);
  }
  Call made{operands, copies.results(), context};
  if (site->numbered) take_lane(made);
  return made;
}

}  // namespace callgate::xla_ffi
