// SPDX-License-Identifier: Apache-2.0
// Images loaded into devices, and their functions.
#include "cuda/module.h"

namespace callgate::cuda {
namespace {

std::string capability_text(int capability) {
  if (capability == 0) return "PTX";
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

}  // namespace

ModuleSet::~ModuleSet() {
  const Driver* cuda = loaded_driver();
  if (cuda == nullptr) return;
  for (const std::unique_ptr<Loaded>& each : loaded_) {
    // At the process's end the driver may be gone: it then refuses, and has freed the modules
    // itself.
    Context before = nullptr;
    if (cuda->context_current(&before) != Result::kSuccess) return;
    if (cuda->context_set_current(each->device->context()) != Result::kSuccess) return;
    cuda->module_unload(each->module);
    cuda->context_set_current(before);
  }
}

Function ModuleSet::function(const Device& device, const std::string& entry,
                             const FunctionNeeds& needs) {
  std::lock_guard lock(mutex_);
  RelaxedCapture relaxed;
  Loaded& module = loaded(device);
  Function function = nullptr;
  Result result = driver().module_function(&function, module.module, entry.c_str());
  if (result != Result::kSuccess)
    throw Error(ErrorCode::kNotFound, "kernel '" + name_ + "': cuModuleGetFunction of '" + entry +
                                          "': " + error_text(result));
  allow(module, function, entry, needs);
  return function;
}

const Image& ModuleSet::choose(const Device& device) const {
  const Image* best = nullptr;
  for (const Image& image : images_) {
    bool runs = image.capability == 0 || (image.capability / 10 == device.capability() / 10 &&
                                          image.capability <= device.capability());
    if (runs && (best == nullptr || image.capability > best->capability)) best = &image;
  }
  if (best != nullptr) return *best;
  std::string got;
  for (const Image& image : images_)
    got += (got.empty() ? "images for " : ", ") + capability_text(image.capability);
  throw Error(
      "kernel '" + name_ + "' on " + device.name() + " (device " +
          std::to_string(device.ordinal()) + ")",
      "an image for compute capability " + capability_text(device.capability()) + ", or PTX",
      (got.empty() ? "none" : got) +
          "; add the device's capability to arch=, or make the kernel in a process that sees the "
          "device");
}

ModuleSet::Loaded& ModuleSet::loaded(const Device& device) {
  for (const std::unique_ptr<Loaded>& each : loaded_)
    if (each->device == &device) return *each;
  const Image& image = choose(device);
  auto made = std::make_unique<Loaded>();
  made->device = &device;
  Result result = driver().module_load(&made->module, image.code.data());
  if (result != Result::kSuccess)
    throw Error(ErrorCode::kInternal,
                "kernel '" + name_ + "': cuModuleLoadData on " + device.name() +
                    " (compute capability " + capability_text(device.capability()) + "), image " +
                    (image.capability == 0 ? "" : "for ") + capability_text(image.capability) +
                    ": " + error_text(result));
  loaded_.push_back(std::move(made));
  return *loaded_.back();
}

void ModuleSet::allow(Loaded& module, Function function, const std::string& entry,
                      const FunctionNeeds& needs) const {
  const Driver& cuda = driver();
  int fixed = ask(cuda.function_attribute, "cuFuncGetAttribute",
                  FunctionAttribute::kSharedSizeBytes, function);
  unsigned& allowed = module.shared_bytes[entry];
  if (needs.shared_bytes + static_cast<unsigned>(fixed) > kSharedByDefault &&
      needs.shared_bytes > allowed) {
    Result result =
        cuda.function_set_attribute(function, FunctionAttribute::kMaxDynamicSharedSizeBytes,
                                    static_cast<int>(needs.shared_bytes));
    if (result != Result::kSuccess) {
      int most = 0;
      DeviceHandle handle = 0;
      if (cuda.device_get(&handle, module.device->ordinal()) == Result::kSuccess)
        cuda.device_attribute(&most, DeviceAttribute::kMaxSharedMemoryPerBlockOptin, handle);
      throw Error("kernel '" + name_ + "': " + std::to_string(needs.shared_bytes) +
                      " bytes of dynamic shared memory beside " + std::to_string(fixed) +
                      " of its own",
                  "at most " + std::to_string(most) + " in all on " + module.device->name(),
                  error_text(result));
    }
    allowed = needs.shared_bytes;
  }
  constexpr auto kWide = FunctionAttribute::kNonPortableClusterSizeAllowed;
  if (needs.wide_cluster)
    check(cuda.function_set_attribute(function, kWide, 1),
          "cuFuncSetAttribute of CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED");
}

}  // namespace callgate::cuda
