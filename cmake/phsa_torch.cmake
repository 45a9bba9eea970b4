# The PyTorch operators, python/csrc, for the torch of the interpreter PHSA_PYTHON. python/csrc/CMakeLists.txt gets
# PHSA_TORCH_DIR, the folder of the torch package.

if(NOT PHSA_TORCH MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "PHSA_TORCH is ${PHSA_TORCH}: it must be ON, OFF or AUTO")
endif()
if(PHSA_TORCH STREQUAL "OFF")
  return()
endif()

if(PHSA_PYTHON)
  # find_spec does not import torch, which takes seconds.
  execute_process(
    COMMAND ${PHSA_PYTHON} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE PHSA_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(PHSA_TORCH_DIR)
  message(STATUS "PyTorch operators: for ${PHSA_TORCH_DIR}")
  add_subdirectory(python/csrc)
elseif(PHSA_TORCH STREQUAL "ON")
  message(FATAL_ERROR "PHSA_TORCH is ON, but PHSA_PYTHON ('${PHSA_PYTHON}') has no torch: "
                      "set PHSA_PYTHON to an interpreter that can import torch")
else()
  message(STATUS "PyTorch operators: not built (no torch in PHSA_PYTHON '${PHSA_PYTHON}')")
endif()
