// What an error of CUDA's means for us. For the sources that are built with CUDA.
#ifndef PHSA_BASE_CUDA_ERROR_H_
#define PHSA_BASE_CUDA_ERROR_H_

#include <cuda_runtime_api.h>

namespace phsa::cuda {

// The device itself, not what it was asked to do; or what it was asked to do ended so that it answers this process
// nothing from then on.
inline bool DeviceFailed(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorContextIsDestroyed:
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceUninitialized:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchTimeout:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown: return true;
    default: return false;
  }
}

}  // namespace phsa::cuda

#endif  // PHSA_BASE_CUDA_ERROR_H_
