# make demo    a virtual environment, the package, `mx-driving check --quick` and examples/surround_view: demo.png
# make test-quick   values, errors, gradients and one compile: a minute
# make test    the same environment, linters and the whole test suite
# make test-ptx   every GPU kernel compiled for sm_90, some for sm_100, and their PTX executed in numpy
# make test-page   the page of mx_driving.viz in Chromium; needs Chromium (BROWSER=/usr/bin/chromium) and its chromedriver
# make sanitize  native tests under Address-, UndefinedBehavior- and ThreadSanitizer; then random calls of CANN's
#              phases and, FUZZ_EXAMPLES each, of our nodes in onnxruntime and of `fuse`
# make bench   the operators on models' workloads, beside plain torch and other packages: benchmarks/results/mine.csv and .png
# make deploy-matrix   each operator in onnxruntime, OpenVINO, ExecuTorch and others: docs/support/deploy.csv; downloads 600 MB
# make test-libraries  `patch` and `fuse` on the real ultralytics, rfdetr and others: docs/support/libraries.csv; downloads 500 MB
# make known   lists which code of the libraries `patch` knows; run it after a release of one of them; downloads 500 MB
# make onnx-forms  `fuse` in every form on the ONNX files that libraries export: docs/support/onnx-forms.csv; downloads 500 MB
# make test-transformers   transformers' own tests of its deformable models, plain and patched; CHECKOUT=its source tree
# make docs    the site: docs/_build/html/index.html
# make tables  writes the tables and charts of the pages from the CSV files; run it after a change in these files
# make compare   compares every instruction set with baseline on CASES=2500 random calls of all operators, both directions
# make test-avx512   the native tests and the comparison with AVX-512; EMULATOR="sde64 -skx --" on a processor without it
# make aarch64   cross-compile, run the native tests under qemu-user, and compare results with those of this processor
# make wheels    the sdist and every platform's wheel, cross-compiled: dist/; AGAIN=1 builds twice and compares; PLATFORM=linux-aarch64 builds one
# make check-wheels  checks the imports and exports of all wheels, and runs tests/native on each: docs/support/wheels.csv
# make test-wheel    the whole test suite against this machine's wheel, installed in an environment of its own
# make test-oldest   the tests with TORCH=2.6.0 and the oldest other packages: downloads 3.5 GB, takes 7 GB of disk
# make release-check   checks that a release can be made: versions, changes, interface, wheels twice, all tests; QUICK=1 builds nothing
# make native  rebuild the C++ library of an existing environment after a change in native/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
NATIVE := CMakeLists.txt native/exports.map $(shell find native -name "*.cpp" -o -name "*.h")
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
# The installation is editable: a change in src/ needs no new installation, a change in native/ or pyproject.toml does. The build
# folder is kept, so that only changed files are compiled again.
EDITABLE := $(PIP) --no-build-isolation --config-settings build-dir=build/editable --editable

NO_COMPILER := Building needs a C++ compiler and there is none: apt install g++, dnf install gcc-c++ or xcode-select --install

# Prints the list above: the lines of this file before the first empty line.
.PHONY: help
help:
	@sed -n '/^$$/q; s/^# //p' Makefile

.PHONY: demo test bench docs lint native sanitize aarch64 clean compiler

compiler:
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "$(NO_COMPILER)"; exit 1; }

# constraints.txt pins torch, because pip could choose a build with several GB of CUDA packages. The package needs torch >= 2.6.
$(VENV)/made: constraints.txt | compiler
	@echo "Making $(VENV) with PyTorch for the CPU: downloads about 250 MB, takes 1 GB of disk and a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch scikit-build-core cmake ninja
	touch $@

$(VENV)/demo: $(VENV)/made pyproject.toml $(NATIVE)
	@echo "Building the package, with what the demo needs: downloads about 50 MB, takes 0.2 GB of disk and a minute or two"
	$(EDITABLE) '.[demo]'
	touch $@

$(STAMP): $(VENV)/made pyproject.toml $(NATIVE)
	@echo "Building the package, with what the tests need: downloads about 700 MB, takes 1.8 GB of disk and some minutes"
	$(EDITABLE) '.[test]'
	touch $@

demo: $(VENV)/demo
	@echo "Checking the operators and drawing the demo: less than a minute"
	$(BIN)/mx-driving check --quick
	$(BIN)/python examples/surround_view/main.py --out demo.png

test: $(STAMP) lint
	@echo "Running the tests: 4 to 13 minutes on 2 cores"
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=20 --durations-min=2

.PHONY: test-quick
test-quick: $(STAMP)
	MX_DRIVING_TEST_BACKENDS=native $(BIN)/python -m pytest -n 2 tests/ops/test_values.py tests/ops/test_errors.py \
		tests/ops/test_autograd.py tests/ops/test_bev_pool_v3.py::test_values \
		"tests/dispatch/test_compile.py::test_compile_fullgraph[multi_scale_deformable_attn-True]"

# `make test` runs a part of these tests. A process can compile Triton kernels for one target only. All tests run for sm_90, those
# of the attention kernels for sm_100; for sm_86 and sm_120 only stack and spills are checked.
PTX_TESTS := tests/gpu $(addprefix tests/ops/test_,nonfinite.py memory.py values.py bev_pool_v3.py geometric_kernel_attention.py \
	multi_scale_deformable_attn.py with_logits.py) \
	tests/ops/test_autograd.py::test_only_wanted_gradients_are_computed
.PHONY: test-ptx
test-ptx: $(STAMP)
	MX_DRIVING_TEST_BACKENDS=triton $(BIN)/python -m pytest -n 2 --dist loadgroup $(PTX_TESTS)
	MX_DRIVING_TEST_BACKENDS=triton MX_DRIVING_TEST_PTX=100 $(BIN)/python -m pytest -n 2 --dist loadgroup tests/gpu/test_triton.py
	for target in 86 120; do \
		MX_DRIVING_TEST_BACKENDS=triton MX_DRIVING_TEST_PTX=$$target $(BIN)/python -m pytest tests/gpu/test_machine_code.py || exit 1; \
	done

# The system provides the browser and its driver: apt install chromium chromium-driver.
BROWSER := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))
NO_BROWSER := The page is tested in Chromium and there is none: apt install chromium chromium-driver, or say BROWSER=its path
$(VENV)/page: $(STAMP)
	$(PIP) selenium
	touch $@

.PHONY: test-page
test-page: $(VENV)/page
	@test -x "$(BROWSER)" || { echo "$(NO_BROWSER)"; exit 1; }
	MX_DRIVING_TEST_BROWSER="$(BROWSER)" $(BIN)/python -m pytest tests/viz/test_page_in_a_browser.py

# pip does not find torch's CPU wheels by itself, and the CUDA build cannot be imported without NVIDIA's libraries.
TORCH := 2.6.0
OLDEST := build/oldest-$(TORCH)
FILES := tests
OLDEST_PIP := $(OLDEST)/bin/python -m pip --disable-pip-version-check install --prefer-binary --constraint constraints-oldest.txt
$(OLDEST)/installed: constraints-oldest.txt pyproject.toml $(NATIVE) | compiler
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) torch==$(TORCH) scikit-build-core cmake ninja
	$(OLDEST_PIP) --no-build-isolation --config-settings build-dir=$(OLDEST)/build --editable '.[test]'
	touch $@

.PHONY: test-oldest
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadgroup --record docs/support/tests.csv --packages oldest $(FILES)

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py --peers --traits --csv benchmarks/results/mine.csv --plot benchmarks/results/mine.png

# The runtimes need many packages, so they get an environment of their own, apart from the tests.
DEPLOY := build/deploy
DEPLOY_PIP := $(DEPLOY)/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt
$(DEPLOY)/installed: constraints.txt pyproject.toml $(NATIVE) | compiler
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY_PIP) torch scikit-build-core cmake ninja
	$(DEPLOY_PIP) --no-build-isolation --config-settings build-dir=$(DEPLOY)/build --editable '.[onnx]'
	$(DEPLOY_PIP) onnxruntime openvino executorch coremltools
	touch $@

.PHONY: deploy-matrix
deploy-matrix: $(DEPLOY)/installed
	$(DEPLOY)/bin/python benchmarks/deploy_matrix.py --csv docs/support/deploy.csv

# Pinned packages of others, without their requirements: they require torch in any version, and pip would replace ours.
LIBRARIES := build/libraries
LIBRARIES_PIP := $(LIBRARIES)/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt
LIBRARIES_SEE := YOLO_CONFIG_DIR=$(CURDIR)/$(LIBRARIES)/ultralytics HF_HUB_OFFLINE=1
$(LIBRARIES)/installed: tests/libraries/requirements.txt tests/libraries/needed.txt constraints.txt pyproject.toml $(NATIVE) | compiler
	$(PYTHON) -m venv $(LIBRARIES)
	$(LIBRARIES_PIP) torch scikit-build-core cmake ninja
	$(LIBRARIES_PIP) --no-build-isolation --config-settings build-dir=$(LIBRARIES)/build --editable '.[examples,onnx]'
	$(LIBRARIES_PIP) --requirement tests/libraries/needed.txt
	$(LIBRARIES_PIP) --no-build-isolation --no-deps --requirement tests/libraries/requirements.txt
	touch $@

.PHONY: test-libraries time-libraries time-onnx-files onnx-forms
test-libraries: $(LIBRARIES)/installed
	$(LIBRARIES_SEE) $(LIBRARIES)/bin/python -m pytest --confcutdir=tests/libraries tests/libraries --record docs/support/libraries.csv

.PHONY: known
known: $(LIBRARIES)/installed
	for package in transformers ultralytics rfdetr groundingdino libreyolo; do \
		$(LIBRARIES_SEE) $(LIBRARIES)/bin/mx-driving forms $$package || exit 1; \
	done

# Transformers' own tests of its deformable models, plain and patched. Prints the tests that fail in only one of the runs. CHECKOUT
# is a source tree of the installed version (the sdist has no tests of models). `parameterized` is installed in a folder of its own.
OWN_TESTS := build/transformers
DEFORMABLE := d_fine deformable_detr deimv2 grounding_dino lw_detr mask2former mm_grounding_dino omdet_turbo oneformer \
	pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rf_detr rt_detr rt_detr_v2
$(OWN_TESTS)/installed: $(STAMP)
	$(BIN)/python -m pip --disable-pip-version-check install --target $(OWN_TESTS)/tools --no-deps parameterized==0.9.0
	touch $@

.PHONY: test-transformers
test-transformers: $(OWN_TESTS)/installed
	@test -d "$(CHECKOUT)/tests/models" || { echo "CHECKOUT must be a source tree of transformers; got '$(CHECKOUT)'"; exit 1; }
	@for way in plain patched; do \
		PYTHONPATH=$(CURDIR)/tests/libraries:$(CURDIR)/$(OWN_TESTS)/tools:$(CHECKOUT) MX_DRIVING_PATCH=$${way#plain} HF_HUB_OFFLINE=1 \
			$(BIN)/python -m pytest -p transformers_plugin -c /dev/null --rootdir $(CHECKOUT) -q -rf -W ignore --tb no \
			$(foreach m,$(DEFORMABLE),$(CHECKOUT)/tests/models/$m/test_modeling_$m.py) | tee $(OWN_TESTS)/$$way.log; \
		grep -o '^FAILED [^ ]*' $(OWN_TESTS)/$$way.log | sort > $(OWN_TESTS)/$$way.failed; \
	done; diff $(OWN_TESTS)/plain.failed $(OWN_TESTS)/patched.failed && tail -1 $(OWN_TESTS)/patched.log | grep passed

# Times every model before and after `patch`. Takes about an hour on a quiet machine.
time-libraries: $(LIBRARIES)/installed
	$(LIBRARIES_SEE) $(LIBRARIES)/bin/python benchmarks/libraries.py groundingdino rfdetr ultralytics --seconds 60 --onnx \
		--csv benchmarks/results/libraries.csv

# Times the files that libraries export, before and after `fuse`. Takes about half an hour on a quiet machine.
time-onnx-files: $(LIBRARIES)/installed
	$(LIBRARIES_SEE) $(LIBRARIES)/bin/python benchmarks/onnx_files.py --csv benchmarks/results/onnx-files.csv

# Compares the outputs of these files with those of every form of `fuse`. Takes some minutes.
onnx-forms: $(LIBRARIES)/installed
	$(LIBRARIES_SEE) $(LIBRARIES)/bin/python benchmarks/onnx_files.py --forms --side 320 --csv docs/support/onnx-forms.csv

# Sphinx treats warnings as errors. The build downloads nothing.
$(VENV)/docs: $(VENV)/made pyproject.toml $(NATIVE)
	test -e $(STAMP) || $(EDITABLE) '.[docs]'
	touch $@

.PHONY: tables
tables: $(VENV)/docs
	$(BIN)/python docs/tables.py

docs: $(VENV)/docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(filter %.cpp %.h,$(NATIVE)) $(wildcard tests/native/*.cpp tests/native/*.h examples/c/*.c* examples/openvino/*.cpp examples/cpp/*.cpp benchmarks/*.c)

native: $(STAMP)

# ThreadSanitizer checks streams, callers and the library's own threads. The tests load no OpenMP runtime, because ThreadSanitizer
# does not know how it waits. One instruction set is enough, because all are compiled from one source.
SANITIZERS := build/asan build/tsan
build/asan: FLAGS := -DMXD_SANITIZE=address,undefined
build/tsan: FLAGS := -DMXD_SANITIZE=thread -DMXD_BASELINE_ONLY=ON
HUGE_ALLOCATIONS_FAIL := ASAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=allocator_may_return_null=1
FUZZ_EXAMPLES := 300

.PHONY: $(SANITIZERS)
$(SANITIZERS): $(VENV)/made
	$(BIN)/cmake -S . -B $@ $(FLAGS) -DMXD_NATIVE_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build $@ --parallel 2
	$(HUGE_ALLOCATIONS_FAIL) $@/tests/native/native_tests

# A line FINDING of tests/native/compare names a case. `build/native-tests/tests/native/compare CASE` repeats this case.
CASES := 2500
NATIVE_TESTS := build/native-tests
.PHONY: native-tests compare test-avx512
native-tests: $(VENV)/made
	$(BIN)/cmake -S . -B $(NATIVE_TESTS) -DMXD_NATIVE_TESTS=ON
	$(BIN)/cmake --build $(NATIVE_TESTS) --parallel 2

compare: native-tests
	$(NATIVE_TESTS)/tests/native/compare 0 $(CASES)

test-avx512: native-tests
	$(EMULATOR) $(NATIVE_TESTS)/tests/native/native_tests
	$(EMULATOR) $(NATIVE_TESTS)/tests/native/compare 0 $(CASES) baseline,avx512

# Needs Debian's g++-aarch64-linux-gnu and qemu-user. Under an emulator results can be checked, times cannot.
AARCH64 := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
QEMU := qemu-aarch64 -L /usr/aarch64-linux-gnu
aarch64: native-tests
	$(BIN)/cmake -S . -B build/aarch64 $(AARCH64) -DMXD_NATIVE_TESTS=ON
	$(BIN)/cmake --build build/aarch64 --parallel 2
	$(QEMU) build/aarch64/tests/native/native_tests
	$(NATIVE_TESTS)/tests/native/compare write 0 $(CASES) | $(QEMU) build/aarch64/tests/native/compare read

sanitize: $(SANITIZERS) fuzz-native fuzz-files

# Random calls of our nodes in onnxruntime and of CANN's phases, in a Python without a sanitizer. Leaks are not detected, because
# Python has its own. libstdc++ is loaded so that libasan finds its functions for exceptions. tests/conftest.py is not loaded,
# because it would import the package first.
.PHONY: fuzz-native fuzz-files
fuzz-native: build/asan $(STAMP)
	LD_PRELOAD="$(foreach name,libasan libstdc++,$(shell $${CXX:-g++} -print-file-name=$(name).so))" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH=tests/helpers FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) \
		FUZZ_LIBRARY=build/asan/libmx_driving.so $(BIN)/python -m pytest -qs --noconftest -c /dev/null --rootdir . -p sanitized \
		tests/onnx/test_fuzz_nodes.py tests/native/test_aclnn_refusals.py

# Random files for `mx-driving fuse`, made by tests/helpers/strategies.py. Examples are the same in each run, except with
# FUZZ_RANDOM=1. A finding is printed with its seed.
fuzz-files: $(STAMP)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/onnx/test_fuzz_fuse.py

# The tools have an environment of their own: the compiler alone takes 0.4 GB. With these tools a build downloads nothing.
TOOLS := .venv-wheels
$(TOOLS)/made: wheels/requirements.txt
	@echo "Making $(TOOLS) with compilers for every system: downloads about 150 MB, takes 0.6 GB of disk"
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install --requirement wheels/requirements.txt
	touch $@

.PHONY: wheels check-wheels test-wheel
wheels: $(TOOLS)/made
	$(TOOLS)/bin/python wheels/make.py $(PLATFORM)
	$(if $(AGAIN),$(TOOLS)/bin/python wheels/make.py --again $(PLATFORM))

check-wheels: $(TOOLS)/made
	$(TOOLS)/bin/python wheels/check.py $(PLATFORM)

# Makes a new environment in each run. pip installs the wheel in dist for this machine, and then its requirements.
TESTED := .venv-wheel-test
TESTED_PYTHON := $(TESTED)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)/python
test-wheel:
	$(PYTHON) -m venv --clear $(TESTED)
	$(TESTED_PYTHON) -m pip --disable-pip-version-check install --no-deps --no-index --find-links dist mx-driving-portable
	$(TESTED_PYTHON) -m pip --disable-pip-version-check install --constraint constraints.txt 'mx-driving-portable[test]' cmake
	$(TESTED_PYTHON) -m pytest -n 2 --dist loadgroup $(TESTS)

# Records the public names for tests/package/test_interface.py. Run it when a release is made.
.PHONY: interface
interface: $(STAMP)
	$(BIN)/python tests/helpers/interface.py

# Runs all checks that one machine can run.
.PHONY: release-check
release-check: $(STAMP)
	$(BIN)/python wheels/release.py
	$(if $(QUICK),,$(foreach step,test sanitize compare wheels test-wheel check-wheels test-avx512 aarch64 docs,\
		$(MAKE) $(step) AGAIN=1 &&) echo "a release can be made")

# Checks that a tag names the version of pyproject.toml: make version TAG=v0.1.0
.PHONY: version
version:
	grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml

# Tests and measures the GPU kernels, offline, with the torch of $(PYTHON). OUT=folder gets the results. DRY=1 needs no GPU.
.PHONY: check-gpu
check-gpu:
	PYTHON=$(PYTHON) DRY=$(DRY) $(if $(OUT),OUT=$(OUT)) benchmarks/check_gpu

clean:
	rm -rf $(VENV) $(TOOLS) $(TESTED) build dist
