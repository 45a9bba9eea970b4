# What phsa is built with. All that is missing is named at once, with the Debian packages that bring it: whoever builds
# through pip sees this message and nothing else of CMake.

set(missing_dependencies "")

# phsa_require(<found> <what> <Debian package>)
macro(phsa_require found what package)
  if(NOT ${found})
    list(APPEND missing_dependencies "${what} (${package})")
    list(APPEND missing_packages ${package})
  endif()
endmacro()

find_package(Threads REQUIRED)
find_package(fmt QUIET)
phsa_require(fmt_FOUND fmt libfmt-dev)
# The library, not its headers alone: with those a file that formats anything takes 5.8 s to compile instead of 1.0, and
# nearly every file of ours does.
set(PHSA_FMT fmt::fmt)
find_package(nlohmann_json QUIET)
phsa_require(nlohmann_json_FOUND nlohmann-json nlohmann-json3-dev)
find_package(PkgConfig QUIET)
phsa_require(PkgConfig_FOUND pkg-config pkg-config)

# phsa_require_module(<prefix> <pkg-config module> <Debian package>): the target PkgConfig::<prefix>.
macro(phsa_require_module prefix module package)
  if(PkgConfig_FOUND)
    pkg_check_modules(${prefix} QUIET IMPORTED_TARGET ${module})
  endif()
  phsa_require(${prefix}_FOUND ${module} ${package})
endmacro()

phsa_require_module(HWY libhwy>=1.0.3 libhwy-dev)
if(PHSA_ENGINE)
  find_package(OpenSSL QUIET COMPONENTS Crypto SSL)
  phsa_require(OPENSSL_FOUND OpenSSL libssl-dev)
  find_package(Boost 1.81 QUIET)
  phsa_require(Boost_FOUND "Boost 1.81" libboost1.81-dev)
  find_package(CLI11 QUIET)
  phsa_require(CLI11_FOUND CLI11 libcli11-dev)
  phsa_require_module(LIBEDIT libedit libedit-dev)
  phsa_require_module(LIBXML2 libxml-2.0 libxml2-dev)
  phsa_require_module(LIBZIP libzip libzip-dev)
  phsa_require_module(LZMA liblzma liblzma-dev)
  phsa_require_module(PCRE2 libpcre2-8 libpcre2-dev)
  phsa_require_module(UTF8PROC libutf8proc libutf8proc-dev)
  phsa_require_module(ZLIB zlib zlib1g-dev)
  phsa_require_module(ZSTD libzstd libzstd-dev)
endif()
include(phsa_python)

if(missing_dependencies)
  list(JOIN missing_dependencies ", " missing_dependencies)
  list(JOIN missing_packages " " missing_packages)
  set(without_engine "")
  if(PHSA_ENGINE)
    set(without_engine "\nThe attention library alone needs less: PHSA_ENGINE=OFF leaves the engine out.")
  endif()
  message(FATAL_ERROR "phsa: not found: ${missing_dependencies}. On Debian:\n"
                      "  sudo apt-get install ${missing_packages}${without_engine}")
endif()
