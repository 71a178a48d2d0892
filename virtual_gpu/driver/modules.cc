// SPDX-License-Identifier: Apache-2.0
// Libraries, globals and the linker: other ways to what a module holds.
#include <cstring>

#include "../fake_driver/world.h"

namespace fakecuda {

FAKECUDA_API Result cuModuleLoadData(cu::Module* module, const void* image);
FAKECUDA_API Result cuModuleUnload(cu::Module module);
FAKECUDA_API Result cuModuleGetFunction(cu::Function* function, cu::Module module,
                                        const char* name);
FAKECUDA_API Result cuFuncGetAttribute(int* value, cu::FunctionAttribute attribute,
                                       cu::Function function);
FAKECUDA_API Result cuFuncSetAttribute(cu::Function function, cu::FunctionAttribute attribute,
                                       int value);
FAKECUDA_API Result cuFuncGetParamInfo(cu::Function function, std::size_t index,
                                       std::size_t* offset, std::size_t* size);

FAKECUDA_API Result cuModuleLoadDataEx(cu::Module* module, const void* image, unsigned, void*,
                                       void**) {
  return cuModuleLoadData(module, image);
}
FAKECUDA_API Result cuModuleLoadFatBinary(cu::Module* module, const void* image) {
  return cuModuleLoadData(module, image);
}
FAKECUDA_API Result cuModuleGetLoadingMode(int* mode) {
  *mode = 1;  // eager
  return Result::kSuccess;
}
FAKECUDA_API Result cuModuleGetGlobal_v2(cu::DevicePointer* pointer, std::size_t* bytes,
                                         cu::Module module, const char* name) {
  return call("cuModuleGetGlobal_v2", kInit, [&](World& world, Lock&) {
    auto it = world.modules.find(module);
    if (it == world.modules.end() || !it->second->alive) return Result::kInvalidHandle;
    if (it->second->ptx == nullptr) return Result::kNotFound;
    auto global = it->second->ptx->global(name);
    if (!global) return Result::kNotFound;
    if (pointer != nullptr) *pointer = global->address;
    if (bytes != nullptr) *bytes = global->bytes;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuFuncGetName(const char** name, cu::Function function) {
  return call("cuFuncGetName", kInit, [&](World& world, Lock&) {
    auto it = world.functions.find(function);
    if (it == world.functions.end()) return Result::kInvalidHandle;
    *name = it->second->kernel->name.c_str();
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuFuncGetModule(cu::Module* module, cu::Function function) {
  return call("cuFuncGetModule", kInit, [&](World& world, Lock&) {
    auto it = world.functions.find(function);
    if (it == world.functions.end()) return Result::kInvalidHandle;
    *module = reinterpret_cast<cu::Module>(it->second->module);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuFuncSetCacheConfig(cu::Function, int) { return Result::kSuccess; }
FAKECUDA_API Result cuFuncIsLoaded(int* state, cu::Function) {
  *state = 1;
  return Result::kSuccess;
}
FAKECUDA_API Result cuFuncLoad(cu::Function) { return Result::kSuccess; }

// A library is a module, and its kernels are functions.
FAKECUDA_API Result cuLibraryLoadData(cu::Module* library, const void* image, void*, void**,
                                      unsigned, void*, void**, unsigned) {
  return cuModuleLoadData(library, image);
}
FAKECUDA_API Result cuLibraryUnload(cu::Module library) { return cuModuleUnload(library); }
FAKECUDA_API Result cuLibraryGetModule(cu::Module* module, cu::Module library) {
  *module = library;
  return Result::kSuccess;
}
FAKECUDA_API Result cuLibraryGetKernel(cu::Function* kernel, cu::Module library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
FAKECUDA_API Result cuLibraryGetGlobal(cu::DevicePointer* pointer, std::size_t* bytes,
                                       cu::Module library, const char* name) {
  return cuModuleGetGlobal_v2(pointer, bytes, library, name);
}
FAKECUDA_API Result cuKernelGetFunction(cu::Function* function, cu::Function kernel) {
  *function = kernel;
  return Result::kSuccess;
}
FAKECUDA_API Result cuKernelGetName(const char** name, cu::Function kernel) {
  return cuFuncGetName(name, kernel);
}
FAKECUDA_API Result cuKernelGetParamInfo(cu::Function kernel, std::size_t index,
                                         std::size_t* offset, std::size_t* size) {
  return cuFuncGetParamInfo(kernel, index, offset, size);
}
FAKECUDA_API Result cuKernelGetAttribute(int* value, cu::FunctionAttribute attribute,
                                         cu::Function kernel, cu::DeviceHandle) {
  return cuFuncGetAttribute(value, attribute, kernel);
}
FAKECUDA_API Result cuKernelSetAttribute(cu::FunctionAttribute attribute, int value,
                                         cu::Function kernel, cu::DeviceHandle) {
  return cuFuncSetAttribute(kernel, attribute, value);
}

// The linker, which numba-cuda uses: one text goes in, and comes out.
namespace {

struct LinkState {
  std::string text;
  bool several = false;
};
constexpr int kInputPtx = 1;

}  // namespace

FAKECUDA_API Result cuLinkCreate_v2(unsigned, void*, void**, LinkState** state) {
  *state = new LinkState();  // cuLinkDestroy's
  return Result::kSuccess;
}
FAKECUDA_API Result cuLinkAddData_v2(LinkState* state, int kind, const void* data,
                                     std::size_t bytes, const char*, unsigned, void*, void**) {
  if (kind != kInputPtx || !state->text.empty()) return Result::kNotSupported;
  state->text.assign(static_cast<const char*>(data), bytes);
  if (state->text.empty() || state->text.back() != '\0') state->text.push_back('\0');
  return Result::kSuccess;
}
FAKECUDA_API Result cuLinkComplete(LinkState* state, void** image, std::size_t* bytes) {
  if (state->text.empty()) return Result::kInvalidValue;
  *image = state->text.data();
  if (bytes != nullptr) *bytes = state->text.size();
  return Result::kSuccess;
}
FAKECUDA_API Result cuLinkDestroy(LinkState* state) {
  delete state;
  return Result::kSuccess;
}

}  // namespace fakecuda
