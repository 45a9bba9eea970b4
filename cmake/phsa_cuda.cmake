# Whether the CUDA kernels are built: PHSA_CUDA_FOUND.

set(PHSA_CUDA OFF CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO (if there is an nvcc)")
set_property(CACHE PHSA_CUDA PROPERTY STRINGS ON OFF AUTO)
set(PHSA_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING "Their targets; a Hopper GPU needs 90a, any other a plain one")
if(NOT PHSA_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "PHSA_CUDA is ${PHSA_CUDA}: it must be ON, OFF or AUTO")
endif()

set(PHSA_CUDA_FOUND ${PHSA_CUDA})
if(PHSA_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(PHSA_CUDA_FOUND ON)
  else()
    set(PHSA_CUDA_FOUND OFF)
  endif()
endif()
