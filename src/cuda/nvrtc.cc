// See the header. The part of NVRTC's interface used here is stable since CUDA 11.2.
#include "cuda/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/lifetime.h"

// X(member, symbol, arguments): every one returns an int, 0 for success.
#define CALLGATE_NVRTC_FUNCTIONS(X)                                                            \
  X(version, "nvrtcVersion", (int* major, int* minor))                                         \
  X(architecture_count, "nvrtcGetNumSupportedArchs", (int* count))                             \
  X(architectures, "nvrtcGetSupportedArchs", (int* architectures))                             \
  X(create, "nvrtcCreateProgram",                                                              \
    (Program * program, const char* source, const char* name, int headers, const char** texts, \
     const char** names))                                                                      \
  X(destroy, "nvrtcDestroyProgram", (Program * program))                                       \
  X(add_name, "nvrtcAddNameExpression", (Program program, const char* expression))             \
  X(compile, "nvrtcCompileProgram", (Program program, int count, const char** options))        \
  X(lowered_name, "nvrtcGetLoweredName",                                                       \
    (Program program, const char* expression, const char** name))                              \
  X(log_size, "nvrtcGetProgramLogSize", (Program program, std::size_t* size))                  \
  X(log, "nvrtcGetProgramLog", (Program program, char* log))                                   \
  X(cubin_size, "nvrtcGetCUBINSize", (Program program, std::size_t* size))                     \
  X(cubin, "nvrtcGetCUBIN", (Program program, char* code))                                     \
  X(ptx_size, "nvrtcGetPTXSize", (Program program, std::size_t* size))                         \
  X(ptx, "nvrtcGetPTX", (Program program, char* code))

namespace callgate::cuda {
namespace {

using Program = struct NvrtcProgram*;

constexpr int kCompilationFailed = 6;
constexpr const char* kCompiler = "CUDA's run-time compiler";

}  // namespace

struct Nvrtc::Functions {
#define X(member, symbol, arguments) int(*member) arguments = nullptr;
  CALLGATE_NVRTC_FUNCTIONS(X)
#undef X
  const char* (*error_string)(int result) = nullptr;
};

namespace {

// A program of NVRTC's, destroyed at the end.
class Compilation : Immovable {
 public:
  explicit Compilation(const Nvrtc::Functions& nvrtc) : nvrtc_(nvrtc) {}
  ~Compilation() {
    if (program != nullptr) nvrtc_.destroy(&program);
  }
  Program program = nullptr;

 private:
  const Nvrtc::Functions& nvrtc_;
};

bool makes_ptx(const std::vector<std::string>& options) {
  return std::ranges::any_of(options, [](const std::string& option) {
    return option.find("=compute_") != std::string::npos;
  });
}

// Text or code of which NVRTC first tells the size.
template <typename Size, typename Get>
std::string bytes_of(Program program, Size size_of, Get get) {
  std::size_t size = 0;
  if (size_of(program, &size) != 0 || size == 0) return {};
  std::string bytes(size, '\0');
  return get(program, bytes.data()) == 0 ? bytes : std::string();
}

std::vector<const char*> pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> all;
  all.reserve(texts.size());
  for (const std::string& text : texts) all.push_back(text.c_str());
  return all;
}

}  // namespace

Nvrtc::Nvrtc(const std::string& path) : path_(path), functions_(std::make_unique<Functions>()) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Error(ErrorCode::kNotFound, kCompiler, "the library '" + path + "'",
                reason == nullptr ? "none" : reason);
  }
  std::string missing;
  auto look_up = [&](auto& function, const char* symbol) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr) missing += std::string(" ") + symbol;
  };
#define X(member, symbol, arguments) look_up(functions_->member, symbol);
  CALLGATE_NVRTC_FUNCTIONS(X)
#undef X
  look_up(functions_->error_string, "nvrtcGetErrorString");
  if (!missing.empty()) {
    throw Error(ErrorCode::kNotFound, kCompiler, "'" + path + "' of CUDA 11.2 or later",
                "one that lacks" + missing);
  }
  int major = 0, minor = 0, count = 0;
  expect(functions_->version(&major, &minor), "nvrtcVersion");
  version_ = 1000 * major + 10 * minor;
  expect(functions_->architecture_count(&count), "nvrtcGetNumSupportedArchs");
  architectures_.resize(static_cast<std::size_t>(count));
  expect(functions_->architectures(architectures_.data()), "nvrtcGetSupportedArchs");
  std::ranges::sort(architectures_);
}

Nvrtc::~Nvrtc() = default;

void Nvrtc::expect(int result, const char* what) const {
  if (result == 0) return;
  throw Error(ErrorCode::kInternal, std::string(kCompiler) + " '" + path_ + "': " + what + ": " +
                                        functions_->error_string(result));
}

const Nvrtc& Nvrtc::open(const std::string& path) {
  static auto* mutex = new std::mutex();  // never destroyed, as what it guards
  static auto* opened = new std::map<std::string, std::unique_ptr<const Nvrtc>>();
  std::lock_guard lock(*mutex);
  std::unique_ptr<const Nvrtc>& slot = (*opened)[path];
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
  const Functions& nvrtc = *functions_;
  std::vector<const char*> names, texts;
  for (const auto& [name, text] : source.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  Compilation made(nvrtc);
  expect(nvrtc.create(&made.program, source.text.c_str(), source.name.c_str(),
                      static_cast<int>(names.size()), texts.data(), names.data()),
         "nvrtcCreateProgram");
  for (const std::string& expression : source.expressions)
    expect(nvrtc.add_name(made.program, expression.c_str()), "nvrtcAddNameExpression");
  std::vector<const char*> options = pointers(source.options);
  int result = nvrtc.compile(made.program, static_cast<int>(options.size()), options.data());
  Compiled compiled;
  compiled.log = bytes_of(made.program, nvrtc.log_size, nvrtc.log);
  if (auto end = compiled.log.find('\0'); end != std::string::npos) compiled.log.resize(end);
  if (result == kCompilationFailed) return compiled;
  if (result != 0 && !compiled.log.empty()) {  // an option that it does not know, say
    compiled.log = std::string(nvrtc.error_string(result)) + "\n" + compiled.log;
    return compiled;
  }
  expect(result, "nvrtcCompileProgram");
  for (const std::string& expression : source.expressions) {
    const char* name = nullptr;
    expect(nvrtc.lowered_name(made.program, expression.c_str(), &name), "nvrtcGetLoweredName");
    compiled.names.emplace_back(name);
  }
  bool ptx = makes_ptx(source.options);
  compiled.code = ptx ? bytes_of(made.program, nvrtc.ptx_size, nvrtc.ptx)
                      : bytes_of(made.program, nvrtc.cubin_size, nvrtc.cubin);
  compiled.ok = !compiled.code.empty();
  return compiled;
}

}  // namespace callgate::cuda
