// SPDX-License-Identifier: Apache-2.0
// The types of CUDA's driver API, as far as this driver has them. Neither building nor using it
// needs CUDA: the numbers and layouts are those of the driver's stable ABI. Names follow the
// driver's, without its prefix.
#pragma once

#include <cstdint>

namespace fakecuda::cu {

// Opaque to callers.
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

enum class Result : int {  // CUresult
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidPtx = 218,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
  kInvalidCapture = 902,  // of captures that were merged
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 906,
  kCapturedEvent = 907,
};

enum class DeviceAttribute : int;  // by their numbers alone

enum class FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
};

enum class PointerAttribute : int { kDeviceOrdinal = 9 };

enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

inline constexpr unsigned kStreamNonBlocking = 1, kWaitValueGeq = 0;

enum class LaunchAttributeId : int { kClusterDimension = 4 };

struct LaunchAttribute {
  LaunchAttributeId id;
  char padding[4];
  unsigned cluster[3];  // of kClusterDimension
  char rest[52];        // other attributes have up to 64 bytes
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {  // of cuLaunchKernelEx
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

}  // namespace fakecuda::cu
