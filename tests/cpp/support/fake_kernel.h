// SPDX-License-Identifier: Apache-2.0
// Kernels written against the C interface, and calls of them without XLA.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel.h"
#include "outcome.h"

namespace callgate::fake {

constexpr int kFloat = static_cast<int>(DType::kF32);

inline callgate_parameter parameter(int kind, int dtype = kFloat, int rank = -1) {
  return {kind, dtype, rank};
}

inline std::shared_ptr<KernelCallee> kernel(std::string name, callgate_function function,
                                            std::vector<callgate_parameter> parameters,
                                            std::vector<std::string> names = {},
                                            KernelCallee::Describe describe = nullptr) {
  KernelInfo info;
  info.name = std::move(name);
  info.function = function;
  info.parameters = std::move(parameters);
  info.parameter_names = std::move(names);
  return std::make_shared<KernelCallee>(std::move(info), std::move(describe));
}

// Views of arrays whose memory and extents live as long as this object.
class Arrays {
 public:
  template <typename T>
  Arrays& add(DType dtype, std::vector<T>& memory, std::vector<std::int64_t> dims) {
    dims_.push_back(std::move(dims));
    views_.push_back({memory.data(), dims_.back().data(),
                      static_cast<std::int32_t>(dims_.back().size()), dtype});
    return *this;
  }
  Arrays& add(std::vector<float>& memory) {
    return add(DType::kF32, memory, {static_cast<std::int64_t>(memory.size())});
  }
  std::vector<ArrayView>& views() { return views_; }

 private:
  std::list<std::vector<std::int64_t>> dims_;
  std::vector<ArrayView> views_;
};

inline Outcome call(KernelSite& site, Arrays& operands, Arrays& results,
                    Executor* executor = nullptr) {
  return Outcome::of([&] { site.run(Call{operands.views(), results.views(), {}}, executor); });
}

// The failure's message; "" for success.
inline std::string message(const Outcome& outcome) {
  return outcome.ok() ? "" : outcome.error().message;
}

// Parameter i of a call.
inline float* operand(const callgate_call* call, int i) {
  return static_cast<float*>(call->operands[call->starts[i]].data);
}
inline float* result(const callgate_call* call, int i) {
  return static_cast<float*>(call->results[call->starts[i]].data);
}
inline std::int64_t size(const callgate_array& array) {
  std::int64_t count = 1;
  for (std::int32_t axis = 0; axis < array.rank; ++axis) count *= array.dims[axis];
  return count;
}

// In x, Out z: z = 2 x
inline std::int32_t twice(const callgate_call* call) {
  for (std::int64_t i = 0; i < size(call->operands[0]); ++i)
    result(call, 1)[i] = 2 * operand(call, 0)[i];
  return 0;
}

inline std::vector<callgate_parameter> in_out() {
  return {parameter(CALLGATE_IN), parameter(CALLGATE_OUT)};
}

}  // namespace callgate::fake
