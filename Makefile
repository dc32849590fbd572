# Two commands do everything, set-up included: `make demo` and `make test`. Both need root or sudo for the mounts.

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dsec
export CARGO_TARGET_DIR ?= $(CACHE)/target
export PATH := $(PATH):$(HOME)/.cargo/bin
export CARGO_TERM_PROGRESS_WHEN ?= never

CARGO := cargo
# Everything but the demo has the dictionary, whose RocksDB takes minutes to build the first time.
FEATURES := --features converter/dictionary
PROGRAMS := $(CARGO_TARGET_DIR)/release

.NOTPARALLEL:
.PHONY: help demo test test-kernels vm vm-test build check run-tests doctest fmt fmt-check lint doc bench fuzz clean
.PHONY: setup-build setup-test setup-vm setup-kernels setup-demo setup-bench

help:
	@echo 'make demo    a layered Debian image, converted, verified, mounted and run from'
	@echo 'make test    set-up, format, lints, documentation, layout rules, and the tests of every tier'
	@echo 'make vm-test the tests that run on a kernel of their own, in a guest (VM_TESTS=NAME for some)'
	@echo 'make test-kernels  the same on the newest packaged kernel;  make vm  a shell in the guest (KERNEL=newest)'
	@echo 'make build   the programs, in $(PROGRAMS)'
	@echo 'make fmt     formats the sources;  make lint  what clippy says'
	@echo 'make bench   all benchmarks (long);  make fuzz  a minute on every fuzz target (SECONDS=60)'
	@echo 'make clean   removes what was built and the demo'"'"'s cache'

setup-build setup-test setup-vm setup-kernels setup-demo setup-bench:
	@fixtures/setup.sh $(sort build $(if $(filter setup-demo,$@),,database) $(@:setup-%=%))

build: setup-build
	$(CARGO) build --release --workspace --bins $(FEATURES)

demo: setup-demo
	$(CARGO) build --release -p converter -p layerd -p fixtures --bins
	@PROGRAMS='$(PROGRAMS)' CACHE='$(CACHE)/demo' fixtures/demo.sh

test: setup-test check doctest run-tests

check: fmt-check lint doc
	@fixtures/checks.sh

fmt-check:
	$(CARGO) fmt --all --check

fmt:
	$(CARGO) fmt --all

lint:
	$(CARGO) clippy --workspace --all-targets $(FEATURES) -- -D warnings

doc:
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --quiet $(FEATURES)

doctest:
	$(CARGO) test --workspace --doc --quiet $(FEATURES)

# One run for all tiers. Last, so that the runner's own summary closes the output.
run-tests:
	@fixtures/run-tests.sh

vm-test: setup-build setup-vm
	@fixtures/run-tests.sh guest stock '$(VM_TESTS)'

test-kernels: setup-build setup-kernels
	@fixtures/run-tests.sh guest newest '$(VM_TESTS)'

KERNEL ?= stock
vm: setup-build $(if $(filter newest,$(KERNEL)),setup-kernels,setup-vm)
	$(CARGO) build --quiet --workspace $(FEATURES) --bin fixtures
	@'$(CARGO_TARGET_DIR)/debug/fixtures' vm shell $(KERNEL)

bench: setup-bench
	$(CARGO) run --release -p benches -- convert

fuzz:
	@fixtures/fuzz.sh $(or $(SECONDS),60)

clean:
	rm -rf '$(CARGO_TARGET_DIR)' '$(CACHE)/demo'
