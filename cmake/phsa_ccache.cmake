# What was compiled before need not be again, where there is a ccache: in another build folder, in another clone. So paths
# are taken relative to the tree; the objects hold none of its absolute ones (-ffile-prefix-map).
find_program(PHSA_CCACHE ccache)
if(PHSA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  get_filename_component(tree ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)
  set(launcher env CCACHE_BASEDIR=${tree} CCACHE_NOHASHDIR=1 ${PHSA_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()
