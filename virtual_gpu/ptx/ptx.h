// SPDX-License-Identifier: Apache-2.0
// PTX, run on the host: what the driver sees of the interpreter.
//
// A Module is one PTX text. Its functions are compiled when they are first asked for, so that text
// which nothing runs may hold instructions that the interpreter doesn't know. Everything here may
// be called from any thread; a Function runs on the caller's thread and on the interpreter's pool,
// and returns when all of its blocks have ended.
//
// Addresses are the device's. What they stand for on the host the driver says through Memory; an
// address that it doesn't know ends the launch with kIllegalAddress and a message that names the
// instruction, its line, and the thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace vgpu::ptx {

// The text is wrong, or holds what the interpreter doesn't know: "line 12: ...".
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// CUDA's own numbers.
enum class Result : int {
  kSuccess = 0,
  kOutOfMemory = 2,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,  // more than VIRTUAL_GPU_STEPS instructions
  kAssert = 710,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kLaunchFailed = 719,  // trap, barriers that never meet
};

struct Outcome {
  Result result = Result::kSuccess;
  std::string message;  // empty for success
};

// Addresses [begin, end) are valid together; the host finds `address` at `address + to_host`.
struct Range {
  std::uint64_t begin = 0, end = 0;
  std::uint64_t to_host = 0;  // added without carry
};

// The driver's memory. Called from any thread, and often: the interpreter keeps what it is told for
// the length of a launch.
class Memory {
 public:
  virtual ~Memory() = default;
  // The live allocation that holds the address; device memory, or pinned memory of the host.
  virtual std::optional<Range> find(std::uint64_t address) = 0;
  // For variables of modules; filled with zeros. 0 where there is none left.
  virtual std::uint64_t allocate(std::size_t bytes, std::size_t alignment) = 0;
  virtual void free(std::uint64_t address) = 0;
};

struct Dim {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint64_t count() const { return std::uint64_t{x} * y * z; }
};

struct Launch {
  Dim grid, block, cluster;
  std::uint32_t dynamic_shared = 0;       // bytes
  bool cooperative = false;               // all blocks run at once, and may wait for each other
  std::span<const std::byte> parameters;  // as Function::parameters() lays them out
};

struct Parameter {
  std::size_t offset, size;
};

// An entry of a module; lives as long as the module.
class Function {
 public:
  virtual ~Function() = default;
  virtual const std::string& name() const = 0;
  virtual std::span<const Parameter> parameters() const = 0;
  virtual std::size_t parameter_bytes() const = 0;
  virtual std::size_t static_shared() const = 0;            // bytes
  virtual std::size_t local_bytes() const = 0;              // of a thread
  virtual std::size_t registers() const = 0;                // of a thread, 32 bits each
  virtual std::uint32_t max_threads() const = 0;            // .maxntid or .reqntid; 1024 otherwise
  virtual std::optional<Dim> required_cluster() const = 0;  // .reqnctapercluster
  virtual Outcome run(const Launch& launch) = 0;
};

struct Global {
  std::uint64_t address;
  std::size_t bytes;
};

class Module {
 public:
  virtual ~Module() = default;
  // Null where there is no such entry. Error where the function can't be compiled.
  virtual Function* function(std::string_view name) = 0;
  virtual std::optional<Global> global(std::string_view name) = 0;
  virtual std::vector<std::string> functions() const = 0;
};

// Throws Error. `memory` must outlive the module.
std::unique_ptr<Module> load(std::string_view text, Memory& memory);

}  // namespace vgpu::ptx
