// Modules, functions and launches of kernels: those that tests registered, and what is in PTX where
// the library has an interpreter. See world.h.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "world.h"

namespace fakecuda {
namespace {

// How long an image is: ELF by its section headers, a fat binary by its header, else text.
std::size_t image_size(const char* image) {
  auto number = [image](std::size_t at, auto value) {
    std::memcpy(&value, image + at, sizeof(value));
    return static_cast<std::size_t>(value);
  };
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) == 0) {
    std::size_t sections =
        number(40, std::uint64_t{}) + number(58, std::uint16_t{}) * number(60, std::uint16_t{});
    std::size_t programs =
        number(32, std::uint64_t{}) + number(54, std::uint16_t{}) * number(56, std::uint16_t{});
    return std::max({sections, programs, std::size_t{64}});
  }
  if (number(0, std::uint32_t{}) == 0xBA55ED50) return 16 + number(8, std::uint64_t{});
  return std::strlen(image);
}

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

Result launch_kernel(const char* symbol, cu::Function function, fakecuda_launch launch,
                     void** parameters, void** extra, bool cooperative = false) {
  return call(symbol, kContext, [&](World& world, Lock&) {
    FunctionState* found = find_function(world, function, symbol);
    StreamState* here = nullptr;
    Result bad = stream_here(world, static_cast<cu::Stream>(launch.stream), symbol, here);
    if (bad != Result::kSuccess) return bad;
    if (found == nullptr) return Result::kInvalidHandle;
    if (found->module->device != here->device && world.strict) {
      world.violation(std::string(symbol) +
                      ": a function of another device: " + found->kernel->name);
      return Result::kInvalidHandle;
    }
    auto kernel = found->kernel;
    if (!possible(launch, *found)) return Result::kInvalidValue;
    if (kernel->ptx != nullptr && kernel->function == nullptr) {
      Work work;
      work.what = "a launch";
      work.run = [kernel, launch, cooperative, bytes = packed(*kernel->ptx, parameters, extra)](
                     bool) { return run_ptx(*kernel->ptx, launch, cooperative, bytes); };
      return enqueue(world, *here, std::move(work), symbol);
    }
    if (extra != nullptr) return Result::kInvalidValue;
    if (!kernel->sizes.empty() && parameters == nullptr) return Result::kInvalidValue;
    Parameters copied;
    for (std::size_t i = 0; i < kernel->sizes.size(); ++i) {
      const char* value = static_cast<const char*>(parameters[i]);
      copied.values.emplace_back(value, value + kernel->sizes[i]);
    }
    Work work;
    work.what = "a launch";
    add_accesses(world, *kernel, copied, work);
    launch.name = kernel->name.c_str();
    work.run = [kernel, launch, copied = std::move(copied)](bool replayed) {
      {
        World& now = World::instance();
        Lock lock(now.mutex);
        log(now, launch, replayed);
      }
      if (kernel->function == nullptr) return Result::kSuccess;
      auto pointers = copied.pointers();
      return Result{kernel->function(pointers.data(), launch.grid, launch.block,
                                     launch.shared_bytes, kernel->user)};
    };
    return enqueue(world, *here, std::move(work), symbol);
  });
}

// PTX begins with a comment or .version; machine code can't be interpreted.
// Without the mutex: the text's variables need memory.
Result load_text(World& world, Lock& lock, ModuleState& module) {
  std::size_t begin = module.image.find_first_not_of(" \n\r\t");
  std::string_view head =
      std::string_view(module.image).substr(std::min(begin, module.image.size()));
  if (!head.starts_with("//") && !head.starts_with("/*") && !head.starts_with(".version")) {
    return Result::kSuccess;  // its functions won't be found
  }
  Result result = Result::kSuccess;
  lock.unlock();
  try {
    module.ptx = world.load_ptx(module.image);
  } catch (const vgpu::ptx::Error& error) {
    std::fprintf(stderr, "virtual GPU: PTX: %s\n", error.what());
    result = kInvalidPtx;
  }
  lock.lock();
  return result;
}

// A kernel of the module's text. Compiled now; what the interpreter doesn't know is an error here.
std::shared_ptr<Kernel> find_ptx(Lock& lock, const ModuleState& module, const char* name) {
  if (module.ptx == nullptr) return nullptr;
  struct Unlocked {  // others go on while it is compiled
    Lock& lock;
    explicit Unlocked(Lock& held) : lock(held) { lock.unlock(); }
    ~Unlocked() { lock.lock(); }
  } unlocked(lock);
  try {
    vgpu::ptx::Function* function = module.ptx->function(name);
    if (function == nullptr) return nullptr;
    auto kernel = std::make_shared<Kernel>();
    kernel->name = name;
    kernel->ptx = function;
    for (const auto& [offset, size] : function->parameters()) kernel->sizes.push_back(size);
    return kernel;
  } catch (const vgpu::ptx::Error& error) {
    std::fprintf(stderr, "virtual GPU: PTX: kernel '%s': %s\n", name, error.what());
    return nullptr;
  }
}

}  // namespace

FAKECUDA_API Result cuModuleLoadData(cu::Module* module, const void* image) {
  return call("cuModuleLoadData", kContext | kUnsafe, [&](World& world, Lock& lock) {
    if (image == nullptr) return Result::kInvalidValue;
    auto owned = std::make_unique<ModuleState>();
    owned->device = current_device();
    const char* text = static_cast<const char*>(image);
    owned->image.assign(text, image_size(text));
    if (world.load_ptx != nullptr) {
      if (Result bad = load_text(world, lock, *owned); bad != Result::kSuccess) return bad;
    }
    *module = reinterpret_cast<cu::Module>(owned.get());
    world.modules.emplace(owned.get(), std::move(owned));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuModuleUnload(cu::Module module) {
  return call("cuModuleUnload", kContext | kUnsafe, [&](World& world, Lock&) {
    auto it = world.modules.find(module);
    if (it == world.modules.end() || !it->second->alive) {
      world.violation("cuModuleUnload: no module, or unloaded before");
      return Result::kInvalidHandle;
    }
    it->second->alive = false;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuModuleGetFunction(cu::Function* function, cu::Module module,
                                        const char* name) {
  return call("cuModuleGetFunction", kInit, [&](World& world, Lock& lock) {
    auto it = world.modules.find(module);
    if (it == world.modules.end() || !it->second->alive) return Result::kInvalidHandle;
    auto kernel = world.kernels.find(name);
    std::shared_ptr<Kernel> found =
        kernel != world.kernels.end() ? kernel->second : find_ptx(lock, *it->second, name);
    if (found == nullptr) return Result::kNotFound;
    auto owned = std::make_unique<FunctionState>();
    owned->module = it->second.get();
    owned->kernel = found;
    if (found->ptx != nullptr) {
      owned->dynamic_shared -=
          static_cast<int>(std::min<std::size_t>(found->ptx->static_shared(), 48 * 1024));
    }
    *function = reinterpret_cast<cu::Function>(owned.get());
    world.functions.emplace(owned.get(), std::move(owned));
    return Result::kSuccess;
  });
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
