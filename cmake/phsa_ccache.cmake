# What was compiled before need not be again, where there is a ccache.
find_program(PHSA_CCACHE ccache)
if(PHSA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${PHSA_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${PHSA_CCACHE})
endif()
