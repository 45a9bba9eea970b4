# Installs libphsa, its headers, the program phsa, and what find_package and pkg-config need. All of it may be moved as a whole.

include(CMakePackageConfigHelpers)

set(cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/phsa)
install(TARGETS phsa EXPORT phsa_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(PHSA_ENGINE)
  install(TARGETS phsa_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  # What the shells complete and the manual page: the program writes them from its own flags. Where it cannot run here (it
  # was built for another machine), they are left out.
  foreach(text IN ITEMS
      "completion bash|${CMAKE_INSTALL_DATADIR}/bash-completion/completions/phsa"
      "completion zsh|${CMAKE_INSTALL_DATADIR}/zsh/site-functions/_phsa"
      "completion fish|${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d/phsa.fish"
      "man|${CMAKE_INSTALL_MANDIR}/man1/phsa.1")
    string(REGEX REPLACE "\\|.*" "" arguments "${text}")
    string(REGEX REPLACE ".*\\|" "" file "${text}")
    string(REPLACE " " ";" arguments "${arguments}")
    install(CODE "
      set(file \"${file}\")
      if(NOT IS_ABSOLUTE \"\${file}\")
        set(file \"\${CMAKE_INSTALL_PREFIX}/\${file}\")
      endif()
      execute_process(COMMAND \"$<TARGET_FILE:phsa_program>\" ${arguments}
        OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
      if(failed)
        message(STATUS \"Left out: \${file} (phsa cannot be run here)\")
      else()
        message(STATUS \"Installing: \$ENV{DESTDIR}\${file}\")
        file(WRITE \"\$ENV{DESTDIR}\${file}\" \"\${text}\")
      endif()")
  endforeach()
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/phsa DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT phsa_targets NAMESPACE phsa:: FILE phsa-targets.cmake DESTINATION ${cmake_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/phsa-config.cmake.in ${PROJECT_BINARY_DIR}/phsa-config.cmake
  INSTALL_DESTINATION ${cmake_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break the API, so only the same minor version is compatible.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/phsa-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/phsa-config.cmake ${PROJECT_BINARY_DIR}/phsa-config-version.cmake
  DESTINATION ${cmake_dir})

# The prefix is found from where the .pc file lies, so that `cmake --install --prefix` and DESTDIR both work. With a
# libdir outside the prefix nothing can be relative: then the paths are those of the configuration.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR} OR IS_ABSOLUTE ${CMAKE_INSTALL_INCLUDEDIR})
  set(PHSA_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
  set(PHSA_PC_LIBDIR ${CMAKE_INSTALL_FULL_LIBDIR})
  set(PHSA_PC_INCLUDEDIR ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH up /prefix/${pc_dir} /prefix)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(PHSA_PC_PREFIX "\${pcfiledir}/${up}")
  set(PHSA_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(PHSA_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
if(BUILD_SHARED_LIBS)
  set(PHSA_PC_REQUIRES "")
  set(PHSA_PC_LIBS "")
else()
  set(PHSA_PC_REQUIRES "Requires: fmt, libhwy >= 1.0.3\n")
  set(PHSA_PC_LIBS " -lstdc++ -lm -pthread")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/phsa.pc.in ${PROJECT_BINARY_DIR}/phsa.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/phsa.pc DESTINATION ${pc_dir})
