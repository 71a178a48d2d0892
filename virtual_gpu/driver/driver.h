// SPDX-License-Identifier: Apache-2.0
// What the files of the virtual GPU's driver share, beside fake_driver.
#pragma once

#include <cstddef>
#include <utility>

namespace fakecuda {

// CU_DEVICE_ATTRIBUTE_*: those of an A100 with little memory, as far as anyone asks.
inline constexpr std::pair<int, int> kDeviceAttributes[] = {
    {1, 1024},         // threads of a block
    {2, 1024},         // block x
    {3, 1024},         // block y
    {4, 64},           // block z
    {5, 0x7FFFFFFF},   // grid x
    {6, 65535},        // grid y
    {7, 65535},        // grid z
    {8, 49152},        // shared memory of a block
    {9, 65536},        // constant memory
    {10, 32},          // warp
    {11, 0x7FFFFFFF},  // pitch
    {12, 65536},       // registers of a block
    {13, 1410000},     // clock rate
    {14, 512},         // alignment of textures
    {15, 1},           // copies overlap
    {16, 108},         // multiprocessors
    {17, 0},           // time limit of kernels
    {18, 0},           // integrated
    {19, 1},           // maps host memory
    {20, 0},           // compute mode
    {31, 1},           // concurrent kernels
    {32, 0},           // ECC
    {35, 0},           // TCC
    {36, 1215000},     // memory clock
    {37, 5120},        // bits of the memory's bus
    {38, 41943040},    // L2 cache
    {39, 2048},        // threads of a multiprocessor
    {40, 2},           // copy engines
    {41, 1},           // unified addresses
    {50, 0},           // PCI domain
    {78, 1},           // stream priorities
    {81, 167936},      // shared memory of a multiprocessor
    {82, 65536},       // registers of a multiprocessor
    {83, 0},           // managed memory
    {95, 1},           // cooperative launches
    {97, 166912},      // shared memory that a block may ask for
    {102, 1},          // virtual memory
    {106, 32},         // blocks of a multiprocessor
    {111, 1024},       // shared memory that is the system's, of a block
    {115, 0},          // memory pools
    {119, 0},
};

std::size_t memory_of_a_device();  // bytes

}  // namespace fakecuda
