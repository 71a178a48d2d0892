// SPDX-License-Identifier: Apache-2.0
// What makes the fake driver a virtual GPU: the interpreter, what the environment says, and the
// memory that kernels see.
//
//   VIRTUAL_GPU_DEVICES=4          how many devices there are; one without
//   VIRTUAL_GPU_CAPABILITY=9.0     what they claim to be; 8.0 without
//   VIRTUAL_GPU_MEMORY=8           GiB of a device
//   VIRTUAL_GPU_DELAY=3000         each work waits for up to so many microseconds
//   VIRTUAL_GPU_SEED=1             of these delays
//   VIRTUAL_GPU_FAIL=symbol:result[:after[:count]],...   calls that fail
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "../fake_driver/world.h"
#include "driver.h"

namespace fakecuda {
namespace {

class DeviceMemory final : public vgpu::ptx::Memory {
 public:
  std::optional<vgpu::ptx::Range> find(std::uint64_t address) override {
    World& world = World::instance();
    Lock lock(world.mutex);
    auto found = find_memory(world, address);
    if (found == nullptr || found->freed) return std::nullopt;
    return vgpu::ptx::Range{found->base, found->base + found->bytes,
                            reinterpret_cast<std::uint64_t>(found->host) - found->base};
  }
  std::uint64_t allocate(std::size_t bytes, std::size_t) override {
    World& world = World::instance();
    Lock lock(world.mutex);
    auto allocation = new_device_memory(world, std::max(current_device(), 0), bytes);
    if (allocation == nullptr) return 0;
    allocation->foreign = true;  // its module's, which never ends
    std::memset(allocation->host, 0, bytes);
    return allocation->base;
  }
  void free(std::uint64_t address) override {
    World& world = World::instance();
    Lock lock(world.mutex);
    auto found = find_memory(world, address);
    if (found != nullptr && !found->freed && found->base == address) free_memory(*found);
  }
};

std::unique_ptr<vgpu::ptx::Module> load(std::string_view text) {
  static auto* memory = new DeviceMemory();
  return vgpu::ptx::load(text, *memory);
}

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoi(text);
}

void set_capability(World& world) {
  const char* text = std::getenv("VIRTUAL_GPU_CAPABILITY");
  int major = 8, minor = 0;
  if (text != nullptr && *text != '\0') {
    major = std::atoi(text);
    const char* dot = std::strchr(text, '.');
    minor = dot == nullptr ? 0 : std::atoi(dot + 1);
  }
  for (int device = 0; device < world.device_count; ++device) {
    auto& attributes = world.devices[device].attributes;
    for (auto [attribute, value] : kDeviceAttributes) attributes[attribute] = value;
    attributes[75] = major;
    attributes[76] = minor;
    attributes[33] = device + 1;  // PCI bus
    attributes[34] = 0;           // PCI device
    if (major >= 9) {
      attributes[16] = 132;
      attributes[81] = 233472;  // shared memory of a multiprocessor
      attributes[97] = 232448;  // and what a block may ask for
    }
  }
}

void set_failures(World& world) {
  const char* text = std::getenv("VIRTUAL_GPU_FAIL");
  std::istringstream all(text == nullptr ? "" : text);
  for (std::string each; std::getline(all, each, ',');) {
    std::istringstream parts(each);
    std::string symbol, word;
    int numbers[] = {719, 0, 1};
    std::getline(parts, symbol, ':');
    for (int& value : numbers) {
      if (std::getline(parts, word, ':')) value = std::atoi(word.c_str());
    }
    world.failures.push_back({symbol, Result{numbers[0]}, numbers[1], numbers[2]});
  }
}

__attribute__((constructor)) void start() {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.strict = false;
  world.device_count = number("VIRTUAL_GPU_DEVICES", 1);
  world.delay = static_cast<unsigned>(number("VIRTUAL_GPU_DELAY", 0));
  world.random.seed(static_cast<unsigned>(number("VIRTUAL_GPU_SEED", 1)));
  world.load_ptx = load;
  set_capability(world);
  set_failures(world);
}

}  // namespace

std::size_t memory_of_a_device() {
  return static_cast<std::size_t>(number("VIRTUAL_GPU_MEMORY", 8)) << 30;
}

}  // namespace fakecuda
