// SPDX-License-Identifier: Apache-2.0
// Loading CUDA's driver: what is found, and what a user is told where it isn't or can't serve.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "core/error.h"
#include "cuda/driver.h"
#include "fake_gpu.h"

namespace callgate::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DriverTest : public fake::GpuTest {
 protected:
  void TearDown() override {
    fakecuda_set_devices(2);
    fakecuda_set_version(12080);
    GpuTest::TearDown();
  }
};

std::string error_of(const std::string& path) {
  try {
    load_driver(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(DriverTest, EveryFunctionOfTheTableIsFound) {
  Driver table = load_driver(CALLGATE_FAKE_CUDA);
#define X(member, symbol, arguments) EXPECT_NE(table.member, nullptr) << symbol;
  CALLGATE_CUDA_FUNCTIONS(X)
  CALLGATE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  EXPECT_EQ(table.version, 12080);
}

TEST_F(DriverTest, IsLoadedOnceForTheProcess) {
  const Driver& first = driver();
  EXPECT_EQ(&driver(), &first);
  EXPECT_EQ(loaded_driver(), &first);
}

TEST_F(DriverTest, AMissingLibraryIsNamed) {
  EXPECT_THAT(error_of("/nowhere/libcuda.so.1"),
              AllOf(HasSubstr("expected the library '/nowhere/libcuda.so.1'"),
                    HasSubstr("NVIDIA's driver"), HasSubstr("cannot open shared object file")));
}

TEST_F(DriverTest, FunctionsThatALibraryLacksAreNamed) {
  EXPECT_THAT(error_of("libm.so.6"),
              AllOf(HasSubstr("'libm.so.6' of CUDA 11.4 or later"),
                    HasSubstr("got one that lacks cuInit cuDriverGetVersion")));
}

TEST_F(DriverTest, FunctionsThatOlderDriversLackAreNotMissed) {
  EXPECT_THAT(error_of("libm.so.6"), ::testing::Not(HasSubstr("cuStreamWaitValue32_v2")));
}

TEST_F(DriverTest, ADriverThatIsTooOldIsRefused) {
  fakecuda_set_version(11030);
  EXPECT_THAT(error_of(CALLGATE_FAKE_CUDA),
              HasSubstr("expected CUDA 11.4 or later, got 11.3; update NVIDIA's driver"));
  fakecuda_set_version(11040);
  EXPECT_EQ(error_of(CALLGATE_FAKE_CUDA), "no error");
}

TEST_F(DriverTest, ADriverWithoutADeviceIsRefused) {
  fakecuda_set_devices(0);
  EXPECT_THAT(error_of(CALLGATE_FAKE_CUDA),
              AllOf(HasSubstr("cuInit"), HasSubstr("no GPU is visible to this process")));
}

TEST_F(DriverTest, AFailureOfAFirstCallIsShown) {
  fakecuda_fail("cuInit", 3, 0, 1);
  EXPECT_THAT(error_of(CALLGATE_FAKE_CUDA), AllOf(HasSubstr("cuInit of '"), HasSubstr("error 3")));
  fakecuda_fail("cuDeviceGetCount", 2, 0, 1);
  EXPECT_THAT(error_of(CALLGATE_FAKE_CUDA), HasSubstr("cuDeviceGetCount"));
}

TEST_F(DriverTest, AnErrorHasTheDriversNameAndText) {
  ASSERT_NE(&driver(), nullptr);
  try {
    check(Result::kOutOfMemory, "cuMemAlloc_v2");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "callgate: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  }
  EXPECT_EQ(error_text(Result{12345}), "CUDA error 12345");
  EXPECT_NO_THROW(check(Result::kSuccess, "cuInit"));
}

// In a process of its own: here the driver is loaded.
TEST(DriverDeathTest, WithoutALibraryEveryRequestSaysSo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("CALLGATE_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
        for (int i = 0; i < 2; ++i) {
          try {
            driver();
            std::_Exit(2);
          } catch (const Error& error) {
            if (std::string(error.what()).find("/nowhere/") == std::string::npos) std::_Exit(3);
          }
        }
        std::_Exit(loaded_driver() == nullptr ? 0 : 4);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace callgate::cuda
