// SPDX-License-Identifier: Apache-2.0
// Functions and launches of kernels: those that tests registered, and what is in PTX where the
// library has an interpreter. See world.h.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "world.h"

namespace fakecuda {
namespace {

FunctionState* find_function(World& world, cu::Function function, const char* symbol) {
  auto it = world.functions.find(function);
  if (it == world.functions.end()) {
    world.violation(std::string(symbol) + ": no function");
    return nullptr;
  }
  if (it->second->module->alive) return it->second.get();
  world.violation(std::string(symbol) +
                  ": a function of an unloaded module: " + it->second->kernel->name);
  return nullptr;
}

// A launch's parameters, copied as the driver does.
struct Parameters {
  std::vector<std::vector<char>> values;
  std::vector<const void*> pointers() const {
    std::vector<const void*> all;
    all.reserve(values.size());
    for (const auto& value : values) all.push_back(value.data());
    return all;
  }
};

// Pointers among them that the kernel is declared to read or write: all of their allocation.
void add_accesses(World& world, const Kernel& kernel, const Parameters& parameters, Work& work) {
  for (auto [index, access] : kernel.accesses) {
    std::uint64_t pointer = 0;
    if (index >= parameters.values.size() || parameters.values[index].size() < sizeof(pointer))
      continue;
    std::memcpy(&pointer, parameters.values[index].data(), sizeof(pointer));
    if (pointer == 0) continue;
    auto found = find_memory(world, pointer);
    std::uint64_t end = found == nullptr ? pointer + 1 : found->base + found->bytes;
    if ((access & 1) != 0) work.accesses.push_back({pointer, end, false});
    if ((access & 2) != 0) work.accesses.push_back({pointer, end, true});
  }
}

// Threads of a block, or the grid, or shared memory beyond what the device has.
bool possible(const fakecuda_launch& launch, const FunctionState& function) {
  std::uint64_t threads = 1;
  for (unsigned n : launch.block) threads *= n;
  const auto* clusters = launch.cluster;
  for (int i = 0; i < 3; ++i) {
    if (launch.grid[i] == 0) return false;
    if (clusters[i] != 0 && launch.grid[i] % clusters[i] != 0) return false;
  }
  if (launch.grid[1] > 65535 || launch.grid[2] > 65535 || launch.grid[0] > 0x7FFFFFFF) return false;
  return threads > 0 && threads <= 1024 &&
         launch.shared_bytes <= static_cast<unsigned>(function.dynamic_shared);
}

void log(World& world, fakecuda_launch launch, bool replayed) {
  launch.name = world.names.insert(launch.name).first->c_str();
  launch.replayed = replayed ? 1 : 0;
  world.launches.push_back(launch);
}

// The parameters as PTX lays them out: from pointers to each, or from `extra`'s buffer.
std::vector<std::byte> packed(const vgpu::ptx::Function& function, void** parameters,
                              void** extra) {
  std::vector<std::byte> bytes(function.parameter_bytes());
  if (parameters != nullptr) {
    std::size_t i = 0;
    for (const auto& [offset, size] : function.parameters()) {
      std::memcpy(bytes.data() + offset, parameters[i++], size);
    }
  } else if (extra != nullptr) {  // pairs: 1 and the buffer, 2 and where its size is
    const void* buffer = nullptr;
    std::size_t size = 0;
    for (std::size_t i = 0; extra[i] != nullptr; i += 2) {
      auto key = reinterpret_cast<std::uintptr_t>(extra[i]);
      if (key == 1) buffer = extra[i + 1];
      if (key == 2) size = *static_cast<const std::size_t*>(extra[i + 1]);
    }
    if (buffer != nullptr) std::memcpy(bytes.data(), buffer, std::min(size, bytes.size()));
  }
  return bytes;
}

vgpu::ptx::Dim dim(const unsigned (&of)[3]) {
  return {std::max(of[0], 1U), std::max(of[1], 1U), std::max(of[2], 1U)};
}

// What the interpreter finds wrong is the result of every call from then on, as a device's is.
Result run_ptx(vgpu::ptx::Function& function, const fakecuda_launch& launch, bool cooperative,
               const std::vector<std::byte>& parameters) {
  vgpu::ptx::Outcome outcome =
      function.run({dim(launch.grid), dim(launch.block), dim(launch.cluster), launch.shared_bytes,
                    cooperative, parameters});
  if (outcome.result == vgpu::ptx::Result::kSuccess) return Result::kSuccess;
  std::fprintf(stderr, "virtual GPU: %s\n", outcome.message.c_str());
  Result result{static_cast<int>(outcome.result)};
  World& world = World::instance();
  Lock lock(world.mutex);
  world.sticky = result;
  return result;
}

Result launch_kernel(const char* symbol, cu::Function function, const fakecuda_launch& shape,
                     void** parameters, void** extra, bool cooperative = false) {
  return call(symbol, kContext, [&](World& world, Lock&) {
    StreamState* here = nullptr;
    Result bad = stream_here(world, static_cast<cu::Stream>(shape.stream), symbol, here);
    if (bad != Result::kSuccess) return bad;
    Work work;
    bad = kernel_work(world, {symbol, function, shape, parameters, extra, cooperative},
                      here->device, work);
    return bad != Result::kSuccess ? bad : enqueue(world, *here, std::move(work), symbol);
  });
}

}  // namespace

Result kernel_work(World& world, const Launch& launch, int device, Work& work) {
  FunctionState* found = find_function(world, launch.function, launch.symbol);
  if (found == nullptr) return Result::kInvalidHandle;
  if (device >= 0 && found->module->device != device && world.strict) {
    world.violation(std::string(launch.symbol) +
                    ": a function of another device: " + found->kernel->name);
    return Result::kInvalidHandle;
  }
  auto kernel = found->kernel;
  fakecuda_launch shape = launch.shape;
  if (!possible(shape, *found)) return Result::kInvalidValue;
  work.what = "a launch";
  if (kernel->ptx != nullptr && kernel->function == nullptr) {
    work.run = [kernel, shape, cooperative = launch.cooperative,
                bytes = packed(*kernel->ptx, launch.parameters, launch.extra)](bool) {
      return run_ptx(*kernel->ptx, shape, cooperative, bytes);
    };
    return Result::kSuccess;
  }
  if (launch.extra != nullptr) return Result::kInvalidValue;
  if (!kernel->sizes.empty() && launch.parameters == nullptr) return Result::kInvalidValue;
  Parameters copied;
  for (std::size_t i = 0; i < kernel->sizes.size(); ++i) {
    const char* value = static_cast<const char*>(launch.parameters[i]);
    copied.values.emplace_back(value, value + kernel->sizes[i]);
  }
  add_accesses(world, *kernel, copied, work);
  shape.name = kernel->name.c_str();
  work.run = [kernel, shape, copied = std::move(copied)](bool replayed) {
    {
      World& now = World::instance();
      Lock lock(now.mutex);
      log(now, shape, replayed);
    }
    if (kernel->function == nullptr) return Result::kSuccess;
    auto pointers = copied.pointers();
    return Result{kernel->function(pointers.data(), shape.grid, shape.block, shape.shared_bytes,
                                   kernel->user)};
  };
  return Result::kSuccess;
}

FAKECUDA_API Result cuFuncGetAttribute(int* value, cu::FunctionAttribute attribute,
                                       cu::Function function) {
  return call("cuFuncGetAttribute", kInit, [&](World& world, Lock&) {
    FunctionState* found = find_function(world, function, "cuFuncGetAttribute");
    if (found == nullptr) return Result::kInvalidHandle;
    const auto* ptx = found->kernel->ptx;
    switch (attribute) {
      case cu::FunctionAttribute::kMaxThreadsPerBlock:
        *value = ptx == nullptr ? 1024 : static_cast<int>(ptx->max_threads());
        break;
      case cu::FunctionAttribute::kSharedSizeBytes:
        *value = ptx == nullptr ? 0 : static_cast<int>(ptx->static_shared());
        break;
      case cu::FunctionAttribute::kNumRegs: *value = 32; break;
      case cu::FunctionAttribute::kMaxDynamicSharedSizeBytes: *value = found->dynamic_shared; break;
      default: *value = 0;
    }
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuFuncSetAttribute(cu::Function function, cu::FunctionAttribute attribute,
                                       int value) {
  return call("cuFuncSetAttribute", kInit, [&](World& world, Lock&) {
    FunctionState* found = find_function(world, function, "cuFuncSetAttribute");
    if (found == nullptr) return Result::kInvalidHandle;
    if (attribute != cu::FunctionAttribute::kMaxDynamicSharedSizeBytes) return Result::kSuccess;
    if (value < 0 || value > 227 * 1024) return Result::kInvalidValue;
    found->dynamic_shared = value;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuFuncGetParamInfo(cu::Function function, std::size_t index,
                                       std::size_t* offset, std::size_t* size) {
  return call("cuFuncGetParamInfo", kInit, [&](World& world, Lock&) {
    FunctionState* found = find_function(world, function, "cuFuncGetParamInfo");
    if (found == nullptr) return Result::kInvalidHandle;
    const auto& sizes = found->kernel->sizes;
    if (index >= sizes.size()) return Result::kInvalidValue;
    if (found->kernel->ptx != nullptr) {
      *offset = found->kernel->ptx->parameters()[index].offset;
      if (size != nullptr) *size = sizes[index];
      return Result::kSuccess;
    }
    std::size_t at = 0;  // each aligned to its size, up to 8
    for (std::size_t i = 0; i <= index; ++i) {
      std::size_t alignment = 1;
      while (alignment < 8 && sizes[i] % (2 * alignment) == 0) alignment *= 2;
      at = (at + alignment - 1) / alignment * alignment;
      if (i < index) at += sizes[i];
    }
    *offset = at;
    if (size != nullptr) *size = sizes[index];
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuLaunchKernel(cu::Function function, unsigned grid_x, unsigned grid_y,
                                   unsigned grid_z, unsigned block_x, unsigned block_y,
                                   unsigned block_z, unsigned shared_bytes, cu::Stream stream,
                                   void** parameters, void** extra) {
  fakecuda_launch launch{nullptr,
                         {grid_x, grid_y, grid_z},
                         {block_x, block_y, block_z},
                         {0, 0, 0},
                         shared_bytes,
                         stream,
                         0};
  return launch_kernel("cuLaunchKernel", function, launch, parameters, extra);
}
FAKECUDA_API Result cuLaunchCooperativeKernel(cu::Function function, unsigned grid_x,
                                              unsigned grid_y, unsigned grid_z, unsigned block_x,
                                              unsigned block_y, unsigned block_z,
                                              unsigned shared_bytes, cu::Stream stream,
                                              void** parameters) {
  fakecuda_launch launch{nullptr,
                         {grid_x, grid_y, grid_z},
                         {block_x, block_y, block_z},
                         {0, 0, 0},
                         shared_bytes,
                         stream,
                         0};
  return launch_kernel("cuLaunchCooperativeKernel", function, launch, parameters, nullptr,
                       /*cooperative=*/true);
}
FAKECUDA_API Result cuLaunchKernelEx(const cu::LaunchConfig* config, cu::Function function,
                                     void** parameters, void** extra) {
  fakecuda_launch launch{nullptr,
                         {config->grid_x, config->grid_y, config->grid_z},
                         {config->block_x, config->block_y, config->block_z},
                         {0, 0, 0},
                         config->shared_bytes,
                         config->stream,
                         0};
  bool cooperative = false;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const cu::LaunchAttribute& attribute = config->attributes[i];
    if (static_cast<int>(attribute.id) == 2) cooperative = attribute.cluster[0] != 0;
    if (attribute.id != cu::LaunchAttributeId::kClusterDimension) continue;
    launch.cluster[0] = attribute.cluster[0];
    launch.cluster[1] = attribute.cluster[1];
    launch.cluster[2] = attribute.cluster[2];
  }
  return launch_kernel("cuLaunchKernelEx", function, launch, parameters, extra, cooperative);
}

FAKECUDA_API void fakecuda_register_kernel(const char* name, fakecuda_kernel function,
                                           std::size_t parameters, const std::size_t* sizes,
                                           void* user) {
  auto kernel = std::make_shared<Kernel>();
  kernel->name = name;
  kernel->function = function;
  kernel->sizes.assign(sizes, sizes + parameters);
  kernel->user = user;
  World& world = World::instance();
  Lock lock(world.mutex);
  world.kernels[name] = std::move(kernel);
}
FAKECUDA_API void fakecuda_declare(const char* name, std::size_t parameter, int access) {
  World& world = World::instance();
  Lock lock(world.mutex);
  if (auto it = world.kernels.find(name); it != world.kernels.end())
    it->second->accesses[parameter] = access;
}
FAKECUDA_API std::size_t fakecuda_image_of(void* function, void* to, std::size_t capacity) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto it = world.functions.find(function);
  if (it == world.functions.end()) return 0;
  const std::string& image = it->second->module->image;
  std::memcpy(to, image.data(), std::min(capacity, image.size()));
  return image.size();
}

}  // namespace fakecuda
