// Kernels of the fake CUDA driver, as functions of the host, and calls of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "cuda/launch.h"
#include "cuda_fake/fakecuda.h"
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

// Its plan for `threads` elements and a factor of 3.
inline std::string scale_plan(int threads) {
  return "launch scale 1,1,1 " + std::to_string(threads) +
         ",1,1 0 - 0000000000000000@0=o0 0000000000000000@0=r0 00004040;";
}

inline ArrayView view(const DeviceVector<float>& memory, const std::vector<std::int64_t>& dims) {
  return {memory.data(), dims.data(), static_cast<std::int32_t>(dims.size()), DType::kF32};
}

inline std::shared_ptr<cuda::LaunchCallee> launch_callee(const std::string& name = "k",
                                                         std::vector<cuda::Image> images = {
                                                             {"image", 90}}) {
  return std::make_shared<cuda::LaunchCallee>(name, std::move(images), nullptr);
}

}  // namespace callgate::fake
