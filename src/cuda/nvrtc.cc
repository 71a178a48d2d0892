// SPDX-License-Identifier: Apache-2.0
// NVRTC, loaded with dlopen, and one compilation.
#include "cuda/nvrtc.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

namespace callgate::cuda {

const Nvrtc& Nvrtc::open(const std::string& path) {
  static constinit std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& slot = immortal<std::map<std::string, std::unique_ptr<const Nvrtc>>>()[path];
  if (slot == nullptr) slot.reset(new Nvrtc(path));  // NOLINT: the constructor is private
  return *slot;
}

std::string Nvrtc::usual_name() {
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"}) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    dlclose(library);
    return name;
  }
  return {};
}

Nvrtc::Compiled Nvrtc::compile(const Source& source) const {
  const Functions& nvrtc = functions_;
  std::vector<const char*> names, texts, options;
  for (const std::string& option : source.options) options.push_back(option.c_str());
  for (const auto& [name, text] : source.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  Program program = nullptr;
  auto destroy = [&nvrtc](Program made) { nvrtc.destroy(&made); };
  expect(nvrtc.create(&program, source.text.c_str(), source.name.c_str(),
                      static_cast<int>(names.size()), texts.data(), names.data()),
         "nvrtcCreateProgram");
  std::unique_ptr<std::remove_pointer_t<Program>, decltype(destroy)> owner(program, destroy);
  for (const std::string& expression : source.expressions)
    expect(nvrtc.add_name(program, expression.c_str()), "nvrtcAddNameExpression");
  int result = nvrtc.compile(program, static_cast<int>(options.size()), options.data());
  Compiled compiled;
  compiled.log = bytes_of(program, nvrtc.log_size, nvrtc.log);
  if (auto end = compiled.log.find('\0'); end != std::string::npos) compiled.log.resize(end);
  if (result == kCompilationFailed) return compiled;
  if (result != 0 && !compiled.log.empty()) {  // such as for an unknown option
    compiled.log = std::string(nvrtc.error_string(result)) + "\n" + compiled.log;
    return compiled;
  }
  expect(result, "nvrtcCompileProgram");
  for (const std::string& expression : source.expressions) {
    const char* name = nullptr;
    expect(nvrtc.lowered_name(program, expression.c_str(), &name), "nvrtcGetLoweredName");
    compiled.names.emplace_back(name);
  }
  bool ptx = std::ranges::any_of(source.options, [](const std::string& option) {
    return option.find("=compute_") != std::string::npos;
  });
  compiled.code = ptx ? bytes_of(program, nvrtc.ptx_size, nvrtc.ptx)
                      : bytes_of(program, nvrtc.cubin_size, nvrtc.cubin);
  compiled.ok = !compiled.code.empty();
  return compiled;
}

Nvrtc::Nvrtc(const std::string& path) : path_(path) {
  void* library = open_library(kCompiler, path, "the library '" + path + "'");
  std::string missing;
#define X(result, member, symbol, arguments) \
  functions_.member = reinterpret_cast<result(*) arguments>(look_up(library, symbol, missing));
  CALLGATE_NVRTC_FUNCTIONS(X)
#undef X
  if (!missing.empty())
    throw Error(ErrorCode::kNotFound, kCompiler, "'" + path + "' of CUDA 11.2 or later",
                "one that lacks" + missing);
  int major = 0, minor = 0, count = 0;
  expect(functions_.version(&major, &minor), "nvrtcVersion");
  version_ = 1000 * major + 10 * minor;
  expect(functions_.architecture_count(&count), "nvrtcGetNumSupportedArchs");
  architectures_.resize(static_cast<std::size_t>(count));
  expect(functions_.architectures(architectures_.data()), "nvrtcGetSupportedArchs");
  std::ranges::sort(architectures_);
}

void Nvrtc::expect(int result, const char* what) const {
  if (result == 0) return;
  throw Error(ErrorCode::kInternal, std::string(kCompiler) + " '" + path_ + "': " + what + ": " +
                                        functions_.error_string(result));
}

}  // namespace callgate::cuda
