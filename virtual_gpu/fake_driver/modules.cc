// SPDX-License-Identifier: Apache-2.0
// Modules: images, and what the interpreter makes of PTX where the library has one. See world.h.
#include <algorithm>
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
    result = Result::kInvalidPtx;
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
    if (found == nullptr) {
      if (world.load_ptx != nullptr && it->second->ptx == nullptr) {
        std::fprintf(stderr, "virtual GPU: kernel '%s': expected PTX, got machine code\n", name);
      }
      return Result::kNotFound;
    }
    auto owned = std::make_unique<FunctionState>();
    owned->module = it->second.get();
    owned->kernel = found;
    if (found->ptx != nullptr) {
      owned->dynamic_shared -= static_cast<int>(
          std::min<std::size_t>(found->ptx->static_shared(), std::size_t{48} << 10));
    }
    *function = reinterpret_cast<cu::Function>(owned.get());
    world.functions.emplace(owned.get(), std::move(owned));
    return Result::kSuccess;
  });
}
}  // namespace fakecuda
