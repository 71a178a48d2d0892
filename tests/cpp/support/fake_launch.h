// SPDX-License-Identifier: Apache-2.0
// Kernels of the fake CUDA driver, as functions of the host, and calls of them.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "cuda/launch.h"
#include "fake_attributes.h"
#include "fake_driver/fakecuda.h"
#include "fake_gpu.h"

namespace callgate::fake {

template <typename T>
T parameter(const void** parameters, std::size_t index) {
  T value;
  std::memcpy(&value, parameters[index], sizeof(value));
  return value;
}

// The host's address of a parameter that is a device pointer.
inline float* floats(const void** parameters, std::size_t index) {
  return static_cast<float*>(fakecuda_host(parameter<std::uint64_t>(parameters, index)));
}

// scale(const float* x, float* y, float a): one block, as many threads as elements.
inline void register_scale() {
  const std::size_t sizes[] = {8, 8, 4};
  fakecuda_register_kernel(
      "scale",
      [](const void** parameters, const unsigned* grid, const unsigned* block, unsigned, void*) {
        const float* x = floats(parameters, 0);
        float* y = floats(parameters, 1);
        for (unsigned i = 0; i < grid[0] * block[0]; ++i)
          y[i] = parameter<float>(parameters, 2) * x[i];
        return 0;
      },
      3, sizes, nullptr);
}

// A parameter of a launch: its bytes, and where in them is an address, of what, and of which.
struct Argument {
  std::vector<std::uint8_t> bytes;
  std::vector<std::array<std::int64_t, 3>> addresses;
};

inline Argument address(cuda::Address::Of of, int index) {
  return {std::vector<std::uint8_t>(8), {{0, static_cast<std::int64_t>(of), index}}};
}
inline Argument operand(int index) { return address(cuda::Address::Of::kOperand, index); }
inline Argument result(int index) { return address(cuda::Address::Of::kResult, index); }
inline Argument scratch(int index) { return address(cuda::Address::Of::kScratch, index); }
inline Argument number(float value) {
  Argument made{std::vector<std::uint8_t>(sizeof value), {}};
  std::memcpy(made.bytes.data(), &value, sizeof value);
  return made;
}

// A launch as programs hold it, of one thread unless `more` says otherwise.
inline AttributeMap launch(const std::string& entry, const std::vector<Argument>& arguments = {},
                           AttributeMap more = {}) {
  std::vector<std::uint8_t> bytes;
  Attribute::Integers starts, addresses;
  for (const Argument& argument : arguments) {
    bytes.resize((bytes.size() + 15) / 16 * 16);
    const auto start = static_cast<std::int64_t>(bytes.size());
    starts.push_back(start);
    for (const auto& [offset, of, index] : argument.addresses)
      addresses.insert(addresses.end(), {start + offset, of, index});
    bytes.insert(bytes.end(), argument.bytes.begin(), argument.bytes.end());
  }
  const Attribute::Integers one{1, 1, 1};
  return with(std::move(more), {{"entry", entry},
                                {"grid", one},
                                {"block", one},
                                {"bytes", Attribute::bytes(bytes)},
                                {"starts", starts},
                                {"addresses", addresses}});
}

inline AttributeMap plan(const std::vector<Attribute>& launches, AttributeMap more = {}) {
  return with(std::move(more), {{"launches", Attribute::listed(launches)}});
}

// A launch of scale() with a factor of 3.
inline AttributeMap scale_launch(const Argument& x, const Argument& y, AttributeMap more = {}) {
  return launch("scale", {x, y, number(3)}, std::move(more));
}

// Its plan for `threads` elements.
inline AttributeMap scale_plan(std::int64_t threads, AttributeMap more = {}) {
  const Attribute::Integers block{threads, 1, 1};
  return plan({scale_launch(operand(0), result(0), {{"block", block}})}, std::move(more));
}

inline ArrayView view(const DeviceVector<float>& memory, const std::vector<std::int64_t>& dims) {
  return {memory.data(), dims.data(), static_cast<std::int32_t>(dims.size()), DType::kF32};
}

inline std::shared_ptr<cuda::LaunchCallee> launch_callee(const std::string& name = "k",
                                                         std::vector<cuda::Image> images = {
                                                             {"image", 90}}) {
  auto text = [name](const std::string& message, const std::string& /*site*/,
                     const std::string& /*lane*/) {
    return "callgate: kernel '" + name + "': " + message;
  };
  return std::make_shared<cuda::LaunchCallee>(name, std::move(images), text);
}

}  // namespace callgate::fake
