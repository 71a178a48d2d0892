// SPDX-License-Identifier: Apache-2.0
// CUDA's run-time compiler, loaded with dlopen: from CUDA C++ to machine code or PTX. It needs
// neither a driver nor a device. Several threads may compile at once. The used part of NVRTC's
// interface is stable since CUDA 11.2.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "cuda/driver.h"

// X(result, member, symbol, arguments): functions that return an int return 0 for success.
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
  // A library by its path, or by a name for the loader. Stays loaded. Throws Error if it is
  // missing.
  static const Nvrtc& open(const std::string& path);

  // The newest of CUDA's usual names that the loader finds; "" for none.
  static std::string usual_name();

  struct Source {
    std::string text;
    std::string name;                                          // for messages
    std::vector<std::string> options;                          // "--gpu-architecture=sm_90", …
    std::vector<std::pair<std::string, std::string>> headers;  // their names and texts
    std::vector<std::string> expressions;  // kernels, by their C++ names: "scale<float, 4>"
  };
  struct Compiled {
    bool ok = false;
    std::string code;  // machine code for "sm_", PTX for "compute_"; "" after a failure
    std::vector<std::string> names;  // of each expression, in the code
    std::string log;                 // errors and warnings
  };
  // A refused source is no Error; any other failure throws.
  Compiled compile(const Source& source) const;

  int version() const noexcept { return version_; }  // 1000 * major + 10 * minor
  // The compute capabilities that it compiles for, in order.
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

  explicit Nvrtc(const std::string& path);

  void expect(int result, const char* what) const;

  // Text or code whose size NVRTC returns first.
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
