# Whether the engine's Python module, python/engine, is built for the interpreter PHSA_PYTHON: PHSA_PYTHON_ENGINE_FOUND.
# It takes nanobind and the headers of Python.

if(NOT PHSA_PYTHON_ENGINE MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "PHSA_PYTHON_ENGINE is ${PHSA_PYTHON_ENGINE}: it must be ON, OFF or AUTO")
endif()

set(PHSA_PYTHON_ENGINE_FOUND OFF)
if(PHSA_PYTHON_ENGINE STREQUAL "OFF" OR NOT PHSA_ENGINE)
  return()
endif()

set(nanobind_FOUND OFF)
set(Python_FOUND OFF)
if(PHSA_PYTHON)
  set(Python_EXECUTABLE ${PHSA_PYTHON})
  # With the component for the stable ABI one build serves Python 3.12 and all later ones.
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
endif()
if(Python_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
                  OUTPUT_VARIABLE nanobind_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # Where pip builds, scikit-build-core has put it on CMake's own path.
  unset(nanobind_DIR CACHE)
  find_package(nanobind CONFIG QUIET HINTS ${nanobind_dir})
endif()

if(Python_FOUND AND nanobind_FOUND)
  set(PHSA_PYTHON_ENGINE_FOUND ON)
  message(STATUS "Python engine: for ${Python_EXECUTABLE} (${Python_VERSION})")
elseif(PHSA_PYTHON_ENGINE STREQUAL "AUTO")
  message(STATUS "Python engine: not built (no nanobind or no Python.h for PHSA_PYTHON '${PHSA_PYTHON}')")
elseif(Python_FOUND)
  message(FATAL_ERROR "PHSA_PYTHON_ENGINE is ON, but PHSA_PYTHON ('${PHSA_PYTHON}') has no nanobind: "
                      "install it there (pip install nanobind)")
else()
  phsa_require(Python_FOUND "the headers of PHSA_PYTHON ('${PHSA_PYTHON}')" python3-dev)
endif()
