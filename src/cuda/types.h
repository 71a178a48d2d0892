// The part of CUDA's driver interface that callgate uses, in its binary form.
//
// Declared here so that neither building nor loading callgate needs CUDA. The numbers and layouts
// are those of CUDA's stable ABI (driver 11.4 and later; what is newer says so). Names follow the
// driver's, without its prefix.
#pragma once

#include <cstddef>
#include <cstdint>

namespace callgate::cuda {

// Opaque to us; the driver's own.
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Graph = struct GraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using UserObject = struct UserObjectHandle*;
using DevicePointer = std::uint64_t;
using DeviceHandle = int;

enum class Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
};

enum class DeviceAttribute : int {
  kMaxThreadsPerBlock = 1,
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum class FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 15,
};

enum class PointerAttribute : int { kDeviceOrdinal = 9 };

enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kWaitValueGeq = 0;

// cuLaunchKernelEx (driver 11.8): a launch with thread block clusters.
enum class LaunchAttributeId : int { kClusterDimension = 4 };

struct LaunchAttribute {
  LaunchAttributeId id;
  char padding[4];
  unsigned cluster[3];  // of kClusterDimension
  char rest[52];        // other attributes have up to 64 bytes
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

}  // namespace callgate::cuda
