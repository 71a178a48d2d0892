// One call of a gate or tap whose arrays are a GPU's, with all that the ways to make it need.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/copies.h"
#include "cuda/device.h"
#include "xla/call_site.h"
#include "xla/cuda_shards.h"
#include "xla/decode.h"

namespace callgate::xla_ffi {

struct CudaSite {
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
  cuda::Stream stream;
  cuda::Device& device;
  CallContext context;

  CudaCall(CudaSite& of, const XLA_FFI_CallFrame& frame)
      : site(of),
        decoded(frame),
        number(of.call_site->shards.take_operand(decoded)),
        stream(static_cast<cuda::Stream>(decode_stream(frame))),
        device(cuda::Device::of(stream)),
        context(decode_context(frame)) {
    context.device = device.id();
    context.stream = stream;
  }

  const CallSite& call_site() const { return *site.call_site; }
  Callee& callee() const { return *site.call_site->callee; }
  bool sharded() const { return number.data != nullptr; }
  Call call() { return {decoded.operands(), decoded.results(), context}; }

  // `sent`, and the partition's number behind them where there is one.
  std::vector<ArrayView> with_number(std::span<const ArrayView> sent) const {
    std::vector<ArrayView> operands(sent.begin(), sent.end());
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

  CopiedCall(const CudaCall& call, std::span<const ArrayView> operands,
             std::span<const ArrayView> results)
      : site(call.site.call_site),
        copies(call.device, call.with_number(operands), results),
        context(call.context),
        sharded(call.sharded()) {}

  // Once the copies are there: the call, without the partition's number, which goes into its
  // context.
  Call call() {
    std::span<const ArrayView> operands = copies.operands();
    if (sharded) {
      context.shard = site->shards.read(operands.back().data);
      operands = operands.first(operands.size() - 1);
    }
    return {operands, copies.results(), context};
  }
  // After call(): whether this device makes it.
  bool runs() const { return site->shards.runs(context.shard); }
};

// The three ways (OnDevice), in cuda_gate.cc, cuda_staged.cc and cuda_deferred.cc. Throw Error.
void run_staged(CudaCall& call);
void run_deferred(CudaCall& call);

}  // namespace callgate::xla_ffi
