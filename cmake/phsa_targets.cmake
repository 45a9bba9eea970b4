# How every target of ours is compiled, and what one folder may see of another.

add_library(phsa_options INTERFACE)
target_compile_features(phsa_options INTERFACE cxx_std_20)
target_compile_options(phsa_options INTERFACE -Wall -Wextra -Wshadow
  -Wno-missing-field-initializers  # PHSA_INIT sets one field and zeroes the rest: that is what it is for
  # GCC 12 sees overlapping copies inside std::string's own assignment (its bug 105651).
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
  # Where a file silences a warning that only GCC has.
  $<$<CXX_COMPILER_ID:Clang>:-Wno-unknown-warning-option>
  $<$<BOOL:${PHSA_WERROR}>:-Werror>
  # A compiler that fuses a*b+c where it happens to inline would round the same sum in two ways, and then chunking
  # could change a selection. Kernels ask for fused products by name.
  -ffp-contract=off
  # File names in messages and debug information are those of the tree, wherever it was built.
  -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)

# What a source has on top in a build with sanitizers: folders, tests and fuzzers alike.
set(PHSA_SANITIZER_OPTIONS "")
if(PHSA_SANITIZE)
  set(PHSA_SANITIZER_OPTIONS -O1 -g1 -UNDEBUG -fsanitize=${PHSA_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
  target_link_options(phsa_options INTERFACE -fsanitize=${PHSA_SANITIZE})
endif()
if(PHSA_FUZZ)
  list(APPEND PHSA_SANITIZER_OPTIONS -fsanitize=fuzzer-no-link)
endif()

# Where the include directories of the folders lie. ccache knows a source by the options it was compiled with, so that a
# second build with those of the first need not compile anything again.
set(PHSA_INCLUDE_ROOTS ${PROJECT_BINARY_DIR}/include-roots CACHE PATH "Include directories of the folders of src/")
mark_as_advanced(PHSA_INCLUDE_ROOTS)

# phsa_add_folder(<name> [UNOPTIMISED] SOURCES ... [USES <folder>...] [PUBLIC_LIBRARIES ...] [PRIVATE_LIBRARIES ...])
#
# UNOPTIMISED: with sanitizers, compiled in half the time; for what has no long loops.
#
# The target phsa_<name>, for the sources of src/<name>. It sees include/, its own folder as "<name>/...", and those of
# the folders it USES: each folder has an include directory of its own with one link in it, so that an include across
# a border that the design does not have is an error of the compiler.
function(phsa_add_folder name)
  cmake_parse_arguments(arg "UNOPTIMISED" "" "SOURCES;USES;PUBLIC_LIBRARIES;PRIVATE_LIBRARIES" ${ARGN})
  set(root ${PHSA_INCLUDE_ROOTS}/${name})
  file(MAKE_DIRECTORY ${root})
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/src/${name} ${root}/${name} SYMBOLIC)
  target_compile_options(phsa_options INTERFACE -ffile-prefix-map=${root}/=src/)

  add_library(phsa_${name} OBJECT ${arg_SOURCES})
  target_include_directories(phsa_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                 $<BUILD_INTERFACE:${root}>)
  target_link_libraries(phsa_${name} PUBLIC ${arg_PUBLIC_LIBRARIES} PRIVATE phsa_options ${arg_PRIVATE_LIBRARIES})
  foreach(used IN LISTS arg_USES)
    target_link_libraries(phsa_${name} PUBLIC phsa_${used})
  endforeach()
  set(sanitized ${arg_SOURCES})
  if(NOT PHSA_SANITIZE_KERNELS)
    # They are compiled as in any other build, so that ccache has them already; instrumented they take minutes.
    list(FILTER sanitized EXCLUDE REGEX "^cpu/kernels")
  endif()
  set_property(SOURCE ${sanitized} APPEND PROPERTY COMPILE_OPTIONS ${PHSA_SANITIZER_OPTIONS})
  if(PHSA_SANITIZE AND arg_UNOPTIMISED)
    set_property(SOURCE ${sanitized} APPEND PROPERTY COMPILE_OPTIONS -O0)
  endif()
endfunction()

# phsa_compile_together(<name> <source>...): with PHSA_COMPILE_TOGETHER these sources of a folder are one for the
# compiler, which then reads what they all include once: half of the work of a build from nothing. After a change of one
# all are compiled. What two sources keep to themselves under one name keeps them from being in one list. CMake's own
# UNITY_BUILD writes absolute paths, which ccache does not know again in another clone.
option(PHSA_COMPILE_TOGETHER "Sources with the same includes are compiled together" OFF)
mark_as_advanced(PHSA_COMPILE_TOGETHER)
function(phsa_compile_together name)
  if(NOT PHSA_COMPILE_TOGETHER OR PHSA_SANITIZE)
    return()
  endif()
  list(TRANSFORM ARGN REPLACE "(.+)" "#include \"${name}/\\1\"\n" OUTPUT_VARIABLE includes)
  list(JOIN includes "" includes)
  list(GET ARGN 0 first)
  set(together ${PHSA_INCLUDE_ROOTS}/together/${name}_${first})
  file(CONFIGURE OUTPUT ${together} CONTENT "${includes}" @ONLY)
  set_source_files_properties(${ARGN} PROPERTIES HEADER_FILE_ONLY ON)
  target_sources(phsa_${name} PRIVATE ${together})
  # A class whose fields are of a type that its source keeps to itself: these sources are included nowhere else.
  target_compile_options(phsa_${name} PRIVATE -Wno-subobject-linkage)
endfunction()

# phsa_embed(<variable> <file>): a file of the tree inside the program, as the std::string_view phsa::<variable>. Its
# source is added to the list `embedded` of whoever calls.
set(PHSA_EMBEDDED_TEXT ${CMAKE_CURRENT_LIST_DIR}/embedded_text.cc.in)
function(phsa_embed name file)
  file(READ ${PROJECT_SOURCE_DIR}/${file} text)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${file})
  configure_file(${PHSA_EMBEDDED_TEXT} ${CMAKE_CURRENT_BINARY_DIR}/${name}.cc @ONLY)
  set(embedded ${embedded} ${CMAKE_CURRENT_BINARY_DIR}/${name}.cc PARENT_SCOPE)
endfunction()
