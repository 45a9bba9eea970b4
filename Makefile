# The front door. Every command does all of its own set-up and may be repeated; `make help` lists them.
# CMake does the building: see CMakePresets.json, or HACKING.md for how to use it without this file.

SHELL := /bin/bash

PREFIX ?= /usr/local
PHSA_VENV ?= .venv
JOBS ?= $(shell nproc)
BENCH_ARGS ?=
SDPA_BENCH_ARGS ?=
LLAMA_BENCH_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 5
LONG_FUZZ_SECONDS ?= 300
VLLM_MODELS ?= smollm2-135m

export PHSA_VENV
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)

python := $(abspath $(PHSA_VENV))/bin/python
# GCC 12's sanitizers cannot live with the widest address randomisation that newer kernels have. Where it may not be
# switched off (some containers), we try without.
no_aslr := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

# Tested with CUDA in it where there is an nvcc: nothing else compiles the kernels and the engine for a GPU. These tests run
# on the CPU, whose bits they know; those of a GPU are scripts/test-cuda.sh's. Sources are compiled together as for the
# demo, the install and pip; the sanitizers' builds compile each alone.
test_options = -DPHSA_COMPILE_TOGETHER=ON -DPHSA_TORCH=AUTO -DPHSA_PYTHON=$(python) -DPHSA_CUDA=AUTO -DPHSA_CUDA_ARCHITECTURES=90a-real

# The steps of a command run in order; the tools inside each step run in parallel.
.NOTPARALLEL:
.PHONY: help demo test test-long test-neon test-vllm bench install format format-check tidy sanitize fuzz build clean \
  packages packages-test venv test-cpp test-asan test-tsan test-python test-gpu

help: ## this list
	@echo "make COMMAND, where COMMAND is one of"
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16 | sed 's/^/  /'
	@echo "Settings: PREFIX ($(PREFIX)), DESTDIR, PHSA_VENV ($(PHSA_VENV)), JOBS ($(JOBS)), DEMO_ARGS, BENCH_ARGS, SDPA_BENCH_ARGS, LLAMA_BENCH_ARGS,"
	@echo "PYTEST_ARGS, FUZZ_SECONDS ($(FUZZ_SECONDS)), LONG_FUZZ_SECONDS ($(LONG_FUZZ_SECONDS)), PHSA_SKIP_PACKAGES=1 (do not ask apt)"

demo: packages ## builds, fetches a small model, asks it about a long text with three attentions, and compares them: demo/report.html
	cmake --preset release -DPHSA_COMPILE_TOGETHER=ON
	cmake --build --preset release --target phsa_program
	scripts/demo.sh build/release/bin $(DEMO_ARGS)

test: packages-test venv format-check test-cpp test-asan fuzz test-tsan test-python test-gpu ## all that can be tested here in half an hour

test-long: packages-test venv ## what takes longer: sanitizers in everything, fuzzers for minutes, tokenizer sweeps, real models
	for preset in asan-full tsan-full; do \
	  cmake --preset $$preset && cmake --build --preset $$preset && $(no_aslr) ctest --preset $$preset || exit; \
	done
	$(MAKE) fuzz FUZZ_SECONDS=$(LONG_FUZZ_SECONDS)
	$(MAKE) test-python PYTEST_ARGS="-m long $(PYTEST_ARGS)"

bench: packages-test ## measures against our dense path, torch's SDPA, tokenizers and llama.cpp (an hour)
	@scripts/make-venv.sh bench
	cmake --preset release -DPHSA_TORCH=AUTO -DPHSA_PYTHON=$(python)
	cmake --build --preset release --target all phsa_torch
	@mkdir -p build/bench
	build/release/bin/phsa models fetch smollm2-135m
	build/release/bin/phsa models fetch qwen2.5-coder-1.5b
	set -o pipefail; for model in smollm2-135m qwen2.5-coder-1.5b; do \
	  $(python) bench/llama_bench.py --model $$(build/release/bin/phsa models path $$model) $(LLAMA_BENCH_ARGS) || exit; \
	done | tee build/bench/llama.txt
	@if [ -d ../shared/tokenizers ]; then set -o pipefail; \
	  $(python) bench/tokenizer_bench.py --tokenizer ../shared/tokenizers/qwen3/tokenizer.json \
	    ../shared/data/haystack_en.txt ../shared/data/haystack_zh.txt | tee build/bench/tokenizer.jsonl; \
	else echo "phsa: bench/tokenizer_bench.py needs a tokenizer.json and texts of yours; skipped"; fi
	set -o pipefail; build/release/bin/bench_linear | tee build/bench/linear.txt
	set -o pipefail; build/release/bin/bench_attention $(BENCH_ARGS) | tee build/bench/attention.txt
	set -o pipefail; PYTHONPATH=python $(python) bench/sdpa_bench.py $(SDPA_BENCH_ARGS) | tee build/bench/sdpa.jsonl

build: packages ## builds the release preset into build/release
	cmake --preset release
	cmake --build --preset release

install: packages ## installs the program phsa, libphsa and its headers into PREFIX
	cmake --preset release -DPHSA_COMPILE_TOGETHER=ON -DCMAKE_INSTALL_PREFIX=$(PREFIX)
	cmake --build --preset release --target phsa phsa_program
	cmake --install build/release --prefix $(PREFIX)
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

format: packages-test venv ## formats all C, C++ and Python files
	scripts/format.sh

format-check: packages-test venv ## fails where `make format` would change something
	scripts/format.sh --check

tidy: ## clang-tidy over the C++ sources
	@scripts/install-packages.sh build test tidy
	cmake --preset release -DPHSA_COMPILE_TOGETHER=OFF
	run-clang-tidy-14 -quiet -p build/release -j $(JOBS) '^$(CURDIR)/(src|tests|bench)/.*\.cc$$'

test-neon: ## the tests of the kernels for 64-bit Arm, under emulation
	@scripts/install-packages.sh build neon
	scripts/test-neon.sh

test-vllm: packages-test venv ## the plugin inside vLLM on the CPU, two versions of it (4 GB each, an hour); VLLM_MODELS
	cmake --preset release $(test_options)
	cmake --build --preset release --target phsa phsa_program phsa_torch
	scripts/test-vllm.sh $(VLLM_MODELS)

sanitize: packages-test test-asan test-tsan ## the C++ tests under ASan and UBSan, the threaded ones under TSan

fuzz: packages-test ## builds the fuzzers and runs each for FUZZ_SECONDS
	cmake --preset asan
	cmake --build --preset asan --target fuzzers
	scripts/run-fuzzers.sh build/asan $(FUZZ_SECONDS)

clean: ## removes what was built (not the virtual environment)
	rm -rf build demo

packages:
	@scripts/install-packages.sh build

packages-test:
	@scripts/install-packages.sh build test

venv:
	@scripts/make-venv.sh

test-cpp: packages-test venv
	cmake --preset release $(test_options)
	cmake --build --preset release --target all phsa_torch
	PHSA_DEVICE=cpu ctest --preset release

test-asan: packages-test
	cmake --preset asan
	cmake --build --preset asan
	$(no_aslr) ctest --preset asan

test-tsan: packages-test
	cmake --preset tsan
	cmake --build --preset tsan
	$(no_aslr) ctest --preset tsan

test-python: packages-test venv
	cmake --preset release $(test_options)
	cmake --build --preset release --target all phsa_torch
	PHSA_DEVICE=cpu PYTHONPATH=python $(python) -m pytest python/tests tests/e2e -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-gpu: packages-test venv
	@if ! command -v nvcc >/dev/null; then \
	  echo "phsa: no nvcc here: the CUDA kernels were not compiled, their tests did not run"; \
	elif ! nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	  echo "phsa: no GPU here: the CUDA kernels were compiled, their tests (scripts/test-cuda.sh) did not run"; \
	else echo "phsa: the tests of the CUDA kernels"; \
	  PYTHON=$(python) PHSA_BIN_DIR=build/release/bin scripts/test-cuda.sh; fi
