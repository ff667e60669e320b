# The commands of the project. `make run` and `make test` work on a bare Debian 12, as root or with
# sudo: they install the packages they need (tools/packages-*.txt).

BUILD := build
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
CONFIGURE = cmake --preset
NINJA = cmake --build

.PHONY: run build cuda install package test test-quantize-memory test-speculation test-simulation check test-asan test-tsan test-peers test-arm64 format format-check lint fuzz bench clean help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

run: build       ## build, get SmolLM2 (98 MB) and let it answer a question
	@tools/demo $(BUILD)/release/bin/freshet

build:           ## the program: build/release/bin/freshet
	@tools/install_packages build
	@$(CONFIGURE) release -DFRESHET_TESTS=OFF
	@$(NINJA) --preset release -j $(JOBS) --target freshet

cuda:            ## the program and its CUDA plug-in, for machines with nvcc: build/cuda/bin
	@tools/install_packages build
	@$(CONFIGURE) cuda -DFRESHET_TESTS=OFF
	@$(NINJA) --preset cuda -j $(JOBS) --target freshet freshet_cuda

# PREFIX and DESTDIR as usual. A build of `make cuda` is installed with its plug-in.
PREFIX ?= /usr/local
install:         ## into PREFIX (/usr/local), below DESTDIR: program, manual pages, completions, service
	@tools/install_packages build
	@set -e; preset=release; plugin=; \
	  if [ -e $(BUILD)/cuda/bin/libfreshet_cuda.so ]; then preset=cuda; plugin=freshet_cuda; fi; \
	  $(CONFIGURE) $$preset -DFRESHET_TESTS=OFF; \
	  $(NINJA) --preset $$preset -j $(JOBS) --target freshet freshet_share $$plugin; \
	  DESTDIR="$(DESTDIR)" cmake --install $(BUILD)/$$preset --prefix "$(abspath $(PREFIX))"

package:         ## a tarball and a .deb, with all libraries but glibc, in build/package/out; CUDA=1: with plug-in
	@tools/install_packages build
	@$(CONFIGURE) package -DFRESHET_CUDA=$(if $(CUDA),ON,OFF)
	@$(NINJA) --preset package -j $(JOBS) --target freshet freshet_share $(if $(CUDA),freshet_cuda)
	@tools/package $(BUILD)/package $(BUILD)/package/out

test:            ## build and run every test; the published models' are skipped where there is no network
	@tools/install_packages build test
	@tools/test release -j $(JOBS)

test-asan:       ## the same under AddressSanitizer and UBSan
	@tools/install_packages build test
	@tools/test asan -j $(JOBS)

test-tsan:       ## the same under ThreadSanitizer
	@tools/install_packages build test
	@tools/test tsan -j $(JOBS)

test-peers:      ## load quantised folders in transformers (downloads torch and others from PyPI)
	@python3 -m venv build/peers_venv
	@build/peers_venv/bin/pip install -q --disable-pip-version-check torch==2.15.0 \
	  transformers==5.24.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2 accelerate safetensors numpy
	@build/peers_venv/bin/python tests/peers/load_in_peers.py build/release/bin/freshet

test-quantize-memory: build ## the memory that quantising a model of 70B widths takes: 15 GB of disk, seven hours of processor time
	@FRESHET=$(BUILD)/release/bin/freshet tests/quantize/memory_test.py

test-speculation: build ## every golden model with every drafter, greedy, sampled and penalised: the same tokens
	@FRESHET_SPECULATION_FULL=1 ctest --test-dir $(BUILD)/release -R '^speculation\.' --output-on-failure

test-simulation: ## 100,000 seeds of the scheduler, the cache and its tiers
	@tools/install_packages build test
	@$(CONFIGURE) release -DFRESHET_TESTS=ON
	@$(NINJA) --preset release -j $(JOBS) --target freshet_simulate
	@$(BUILD)/release/src/scheduler/freshet_simulate

# What an instruction set can change; the rest would take hours under emulation.
ARM64_TESTS = backend_cpu_test op_conformance_test golden_test
test-arm64:      ## cross-compile for 64-bit ARM; kernels and golden models under emulation
	@tools/install_packages build test arm64
	@$(CONFIGURE) arm64 -DFRESHET_TESTS=ON
	@$(NINJA) --preset arm64 -j $(JOBS) --target freshet $(ARM64_TESTS)
	@set -e; for test in $(ARM64_TESTS); do \
	  qemu-aarch64 $$(find $(BUILD)/arm64 -name $$test -type f) --gtest_brief=1; done

check:           ## order of the rooms, style, plain English, links, generated docs
	@tools/check_layers.py
	@tools/check_style.py
	@tools/check_english.py
	@tools/check_links.py
	@tools/check_commit_message.py --self-test
	@tools/gpu_kernel_table.py --check
	@tools/check_gpu_names.py

SOURCES = $(shell git ls-files 'src/*.h' 'src/*.cc' 'src/*.inl' 'src/*.cu' 'src/*.cuh' 'include/*.h' 'tests/*.cc' 'tests/*.h' 'bench/*.cc' 'bench/*.h' 'examples/*.cc')

format:          ## lay out all sources with clang-format
	@tools/install_packages dev
	@clang-format-19 -i $(SOURCES)

format-check:    ## fail where clang-format would change something
	@clang-format-19 --dry-run --Werror $(SOURCES)

lint:            ## clang-tidy over all sources
	@tools/install_packages build test dev
	@$(CONFIGURE) dev -DFRESHET_TESTS=ON
	@run-clang-tidy-19 -quiet -p $(BUILD)/dev -j $(JOBS) '$(CURDIR)/(src|tests|bench)/.*\.cc$$'

fuzz:            ## each fuzz target for FUZZ_SECONDS
	@tools/install_packages build dev
	@$(CONFIGURE) fuzz
	@$(NINJA) --preset fuzz -j $(JOBS)
	@tools/fuzz $(BUILD)/fuzz $(FUZZ_SECONDS)

bench: build     ## measure SmolLM2 against the limits of this machine
	@$(BUILD)/release/bin/freshet bench -m $$(tools/get_model smollm2)

clean:
	@rm -rf $(BUILD)
