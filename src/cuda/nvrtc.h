// CUDA's run-time compiler, loaded with dlopen: CUDA C++ to machine code or PTX. Needs neither a
// driver nor a device. Compilations on several threads are fine.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/lifetime.h"

namespace callgate::cuda {

class Nvrtc : Immovable {
 public:
  struct Functions;  // of the library

  // A library by its path, or as the loader names it. Stays loaded. Throws Error without one.
  static const Nvrtc& open(const std::string& path);
  // Of CUDA's usual names, the newest that the loader finds; "" for none.
  static std::string usual_name();

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
  Compiled compile(const Source& source) const;

  int version() const noexcept { return version_; }  // 1000 * major + 10 * minor
  // Compute capabilities that it compiles for, in order.
  const std::vector<int>& architectures() const noexcept { return architectures_; }
  ~Nvrtc();

 private:
  explicit Nvrtc(const std::string& path);
  void expect(int result, const char* what) const;
  std::string path_;
  std::unique_ptr<Functions> functions_;
  int version_ = 0;
  std::vector<int> architectures_;
};

}  // namespace callgate::cuda
