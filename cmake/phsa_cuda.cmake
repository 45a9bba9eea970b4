# Whether the CUDA kernels are built: PHSA_CUDA_FOUND.

set(PHSA_CUDA OFF CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO (if there are nvcc and cuBLASLt)")
set_property(CACHE PHSA_CUDA PROPERTY STRINGS ON OFF AUTO)
set(PHSA_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING "Their targets; a Hopper GPU needs 90a, any other a plain one")
if(NOT PHSA_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "PHSA_CUDA is ${PHSA_CUDA}: it must be ON, OFF or AUTO")
endif()

# find_package(CUDAToolkit): that of CMake 3.25 wants to set a property of CUDA::nvToolsExt, which CUDA 13 has no more.
macro(phsa_find_cuda)
  if(NOT TARGET CUDA::nvToolsExt)
    add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
  endif()
  find_package(CUDAToolkit 12 ${ARGN})
endmacro()

set(PHSA_CUDA_FOUND ${PHSA_CUDA})
if(PHSA_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  set(PHSA_CUDA_FOUND OFF)
  if(CMAKE_CUDA_COMPILER)
    # C++20 and Hopper's instructions are known from CUDA 12 on; the engine includes cuBLASLt's header.
    phsa_find_cuda(QUIET)
    find_path(PHSA_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    mark_as_advanced(PHSA_CUBLASLT_INCLUDE)
    if(CUDAToolkit_FOUND AND (PHSA_CUBLASLT_INCLUDE OR NOT PHSA_ENGINE))
      set(PHSA_CUDA_FOUND ON)
    endif()
  endif()
endif()

# CUDA's run time for whoever links our objects, and its headers for none of them: a source that has no business with CUDA
# is compiled alike in every build, so that ccache has it.
if(PHSA_CUDA_FOUND)
  phsa_find_cuda(REQUIRED)
  if(NOT TARGET phsa_cudart)
    add_library(phsa_cudart INTERFACE)
    target_link_libraries(phsa_cudart INTERFACE $<LINK_ONLY:CUDA::cudart_static>)
  endif()
endif()
