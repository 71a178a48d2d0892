// SPDX-License-Identifier: Apache-2.0
// CUDA's run-time compiler, loaded with dlopen: CUDA C++ to machine code or PTX. Needs neither a
// driver nor a device. Compilations on several threads are fine. The part of NVRTC's interface used
// here is stable since CUDA 11.2.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "cuda/driver.h"

// X(result, member, symbol, arguments): those with an int give 0 for success.
#define CALLGATE_NVRTC_FUNCTIONS(X)                                                            \
  X(int, version, "nvrtcVersion", (int* major, int* minor))                                    \
  X(int, architecture_count, "nvrtcGetNumSupportedArchs", (int* count))                        \
  X(int, architectures, "nvrtcGetSupportedArchs", (int* architectures))                        \
  X(int, create, "nvrtcCreateProgram",                                                         \
    (Program*, const char* source, const char* name, int headers, const char** texts,          \
     const char** names))                                                                      \
  X(int, destroy, "nvrtcDestroyProgram", (Program*))                                           \
  X(int, add_name, "nvrtcAddNameExpression", (Program, const char* expression))                \
  X(int, compile, "nvrtcCompileProgram", (Program, int count, const char** options))           \
  X(int, lowered_name, "nvrtcGetLoweredName", (Program, const char* expression, const char**)) \
  X(int, log_size, "nvrtcGetProgramLogSize", (Program, std::size_t* size))                     \
  X(int, log, "nvrtcGetProgramLog", (Program, char* log))                                      \
  X(int, cubin_size, "nvrtcGetCUBINSize", (Program, std::size_t* size))                        \
  X(int, cubin, "nvrtcGetCUBIN", (Program, char* code))                                        \
  X(int, ptx_size, "nvrtcGetPTXSize", (Program, std::size_t* size))                            \
  X(int, ptx, "nvrtcGetPTX", (Program, char* code))                                            \
  X(const char*, error_string, "nvrtcGetErrorString", (int result))

namespace callgate::cuda {

class Nvrtc : Immovable {
 public:
  // A library by its path, or as the loader names it. Stays loaded. Throws Error without one.
  static const Nvrtc& open(const std::string& path) {
    static constinit std::mutex mutex;
    std::lock_guard lock(mutex);
    auto& slot = immortal<std::map<std::string, std::unique_ptr<const Nvrtc>>>()[path];
    if (slot == nullptr) slot.reset(new Nvrtc(path));  // NOLINT: the constructor is private
    return *slot;
  }

  // Of CUDA's usual names, the newest that the loader finds; "" for none.
  static std::string usual_name() {
    for (const char* name :
         {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"}) {
      void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      dlclose(library);
      return name;
    }
    return {};
  }

  struct Source {
    std::string text;
    std::string name;                                          // as messages call it
    std::vector<std::string> options;                          // "--gpu-architecture=sm_90", …
    std::vector<std::pair<std::string, std::string>> headers;  // their names and texts
    std::vector<std::string> expressions;  // kernels, as C++ names them: "scale<float, 4>"
  };
  struct Compiled {
    bool ok = false;
    std::string code;                // machine code for "sm_", PTX for "compute_"; "" if it failed
    std::vector<std::string> names;  // of each expression, in the code
    std::string log;                 // errors and warnings
  };
  // A source that the compiler refuses is no Error; what else fails is.
  Compiled compile(const Source& source) const {
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
    if (result != 0 && !compiled.log.empty()) {  // an option that it does not know, say
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

  int version() const noexcept { return version_; }  // 1000 * major + 10 * minor
  // Compute capabilities that it compiles for, in order.
  const std::vector<int>& architectures() const noexcept { return architectures_; }

 private:
  using Program = struct NvrtcProgram*;
  struct Functions {
#define X(result, member, symbol, arguments) result(*member) arguments = nullptr;
    CALLGATE_NVRTC_FUNCTIONS(X)
#undef X
  };
  static constexpr int kCompilationFailed = 6;
  static constexpr const char* kCompiler = "CUDA's run-time compiler";

  explicit Nvrtc(const std::string& path) : path_(path) {
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

  void expect(int result, const char* what) const {
    if (result == 0) return;
    throw Error(ErrorCode::kInternal, std::string(kCompiler) + " '" + path_ + "': " + what + ": " +
                                          functions_.error_string(result));
  }

  // Text or code of which NVRTC first tells the size.
  template <typename Size, typename Get>
  static std::string bytes_of(Program program, Size size_of, Get get) {
    std::size_t size = 0;
    if (size_of(program, &size) != 0 || size == 0) return {};
    std::string bytes(size, '\0');
    return get(program, bytes.data()) == 0 ? bytes : std::string();
  }

  std::string path_;
  Functions functions_;
  int version_ = 0;
  std::vector<int> architectures_;
};

}  // namespace callgate::cuda
