# Thaw's commands. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Where rustup puts cargo, for the run in which `setup` has just installed it.
export PATH := $(PATH):$(HOME)/.cargo/bin

TARGET  := target/x86_64-unknown-linux-gnu
BIN     := $(TARGET)/release
CACHE   := $(or $(THAW_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/thaw)
KERNEL  := $(CACHE)/kernel/vmlinux-6.1

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo: ## run a real image in a microVM and show where the time went; `FULL=yes`: every stage
	@tests/demo $(if $(FULL),full)

test: unit e2e ## unit tests here, then the end-to-end tests that are not long (natively, or in the lab)

unit: ## unit, property and tiny-guest tests
	@./setup test
	@$(MAKE) build
	tests/test-scripts
	cargo test --release --workspace --exclude thaw-e2e --no-fail-fast

e2e: ## end-to-end tests on real images, without the long ones; `TEST=name`: those whose name matches; `ALL=yes`: the long ones too
	@./setup test
	@$(MAKE) kernel build
	@$(if $(ALL),THAW_ALL_FORMS=yes) tests/e2e/run $(if $(ALL),--all yes --timeout 3600) $(TEST)

e2e-images: ## every form of an image by every serving, and every fault of a registry: long
	@./setup test
	@$(MAKE) kernel build
	@THAW_ALL_FORMS=yes tests/e2e/run --all yes --only 'image_*' --timeout 3600

soak: ## 24,000 creations of a tiny guest here; 1,000 thaws in a row, 100 at once, 100 clones compared: hours in the lab
	@./setup test
	@$(MAKE) kernel build
	THAW_SOAK_CREATES=24000 cargo test --release --workspace --exclude thaw-e2e --test soak -- --nocapture
	@THAW_SOAK_SUCCESSIVE=1000 THAW_SOAK_PARALLEL=100 THAW_CLONES=100 \
	  tests/e2e/run --all yes --timeout 14400 --memory 20G many_thaws no_two_clones

test-upgrade: ## sandboxes of the previous release under this one, and back: real programs of both, tiny guests; `LINUX=yes`: Linux too
	@./setup test
	@$(if $(LINUX),$(MAKE) kernel build)
	@tests/upgrade/run $(if $(LINUX),--linux)

lint: ## formatting, clippy, known vulnerabilities of dependencies (where their database can be fetched: it says so)
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings --cfg fuzzing
	@tests/advisories

house: ## measures of the source tree beside their limits; `LIST="duplicates long-files"`: the places of those
	@tests/house/run $(LIST)

advisories: ## known vulnerabilities of every dependency; fails where the database of them cannot be fetched
	@tests/advisories --must

fuzz: ## each fuzz target for MINUTES=n minutes (1), as many at once as there are processors
	@./setup fuzz
	@tests/fuzz/run --seconds $$((60 * $(or $(MINUTES),1)))

deny: ## licences, bans and sources of every dependency (cargo-deny is installed when absent)
	@command -v cargo-deny >/dev/null || cargo install --locked --quiet cargo-deny
	cargo deny --log-level error check bans licenses sources

build: $(BIN)/guest.erofs ## thaw, thawd, thaw-vmm and the guest image

# By name, not by package: every build of the tree then shares one set of features. Benchmarks build their own.
PROGRAMS := thaw thawd thaw-vmm thaw-share containerd-shim-thaw-v2 thaw-guest-image
# cargo decides what is out of date; these run every time and do nothing when nothing changed.
.PHONY: binaries agent
binaries:
	@cargo build --release $(PROGRAMS:%=--bin %)
agent:
	@cargo build --profile guest -p thaw-agent

$(BIN)/guest.erofs: binaries agent
	@$(BIN)/thaw-guest-image $(TARGET)/guest/thaw-agent $@

PREFIX  ?= /usr/local
install: ## what `make build kernel` built, to PREFIX (/usr/local), below DESTDIR; then: thaw install --runtime containerd
	@packaging/install --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

uninstall: ## take it away again, from containerd too
	@if [ -z "$(DESTDIR)" ] && [ -x "$(PREFIX)/bin/thaw" ]; then "$(PREFIX)/bin/thaw" uninstall --runtime containerd; fi
	@packaging/install --prefix "$(PREFIX)" --destdir "$(DESTDIR)" --remove

deb: ## a Debian package of it, in target/package
	@$(MAKE) kernel build
	@packaging/debian/build target/package

node-image: ## the image the Helm chart installs nodes with: its build context in target/package; TAG=…: builds it
	@$(MAKE) kernel build
	@packaging/kubernetes/build target/package $(TAG)

release: ## every file of a release, in target/release-VERSION; `KEY=FILE`: signs them with that Ed25519 key
	@./setup build kernel run release
	@$(MAKE) kernel
	@packaging/release/build $(if $(KEY),--key "$(KEY)") "target/release-$$(packaging/version)"

kernel: ## the guest kernel, cached outside the tree
	@./setup kernel
	@guest-kernel-config/build >/dev/null

bench-boot: ## boot to agent ready, by stage, beside QEMU's microvm
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run boot

bench-devices: ## disk, network, volume and vsock of a guest beside QEMU's microvm with vhost-net and virtiofsd; `QUICK=1`: a first look
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run devices $(if $(QUICK),--quick)

bench-thaw: ## claim to first guest byte beside the bare system calls and QEMU; thaw beside cold boot
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run thaw

bench-create: ## creations through thawd's API, 1 to 200 at once, of a tiny guest and of Linux; what 10,000 leave; `QUICK=1`: a first look
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run create $(if $(QUICK),--quick)

bench-network: ## packets through a sandbox's network, redirected by eBPF and by nftables in turn; `QUICK=1`: a first look
	@./setup test
	@tests/bench/run network $(if $(QUICK),--quick)

bench-image: ## starts by an image's form, a guest's reads beside ext4, bytes saved; `make bench-image QUICK=1` is a first look
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run image $(if $(QUICK),--quick)

bench-shim: ## `ctr run` with runc and with Thaw in turn, 50 pods at once, memory of a pod; `QUICK=1`: a first look
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run shim $(if $(QUICK),--quick)

test-package: ## the Debian package, and the Kubernetes image on a node of systemd: installed, used and removed beside Debian's containerd
	@./setup test
	@$(MAKE) kernel build
	@tests/package/run

test-release: ## two packings of a release compared; `WHOLE=yes`: everything compiled twice; `ROOTS=yes`: run in clean roots of two distributions
	@./setup test release
	@$(MAKE) kernel build
	@tests/release/run $(if $(WHOLE),--whole) $(if $(ROOTS),--roots)

test-containerd: ## containerd's own client suite with Thaw, and the table beside runc; `RUNC=yes`: with runc again; `TEST=pattern`: those tests
	@./setup test suites
	@$(MAKE) kernel build
	@tests/containerd/run $(if $(RUNC),--runc) $(if $(TEST),-run '$(TEST)')

test-k8s: ## Kubernetes on one node with Thaw as its pods' runtime, and the table beside runc; `RUNC=yes`: with runc again; `TEST=name`: that test
	@./setup test suites
	@$(MAKE) kernel build
	@tests/kubernetes/run $(if $(RUNC),--runc) $(TEST)

test-api: ## what the API's document promises, asked by Schemathesis and by a client generated from it
	@./setup test api
	@$(MAKE) kernel build
	@tests/api/run

test-e2b: ## E2B's SDKs for Python and JavaScript, unchanged, against thawd: over fakes, and with real guests
	@./setup test e2b
	@$(MAKE) kernel build
	@tests/e2b/run

test-quickstart: ## the commands of docs/quickstart.md, docs/snapshots.md and docs/e2b.md, typed in the lab; `WRITE=yes`: their output into them
	@./setup test
	@$(MAKE) kernel build
	@tests/quickstart/run $(if $(WRITE),--write)

test-lab: ## the lab's and the test images' tests of themselves
	@./setup test
	@tests/lab/test
	@tests/images/build
	@tests/images/test

nightly: ## every test there is, and docs/nightly.md of it: many hours; `ONLY="fuzz upgrade"`: those parts; `MINUTES=n`: fuzz so long
	@cargo build --release --quiet --bin thaw-nightly
	@MINUTES=$(MINUTES) $(BIN)/thaw-nightly $(ONLY)

bench-host: ## many VMMs killed at once, and what that leaves of this host; `MOST=200`: no more than 200
	@./setup test
	@tests/bench/run host $(if $(MOST),--most $(MOST))

bench-data: ## a guest's requests to its disks beside a plain program's to a file; `QUICK=1`: a first look
	@./setup test
	@tests/bench/run data $(if $(QUICK),--quick)

bench-snapshot: ## thaws of a user's snapshot beside creations; a warm server's snapshot here, in a registry and on another node; `QUICK=1`: a first look
	@./setup test
	@$(MAKE) kernel build
	@tests/bench/run snapshot $(if $(QUICK),--quick)

bench-service: ## E2B's Python SDK beside thawd's own API, the gateway beside direct requests, memory of paused sandboxes; `QUICK=1`: a first look
	@./setup test api
	@$(MAKE) kernel build
	@tests/bench/run service $(if $(QUICK),--quick)

bench-tenants: ## what it costs that tenants share no image and no template; `QUICK=1`: a first look
	@./setup test
	@tests/bench/run tenants $(if $(QUICK),--quick)

bench-alternatives: ## mechanisms that do one job in two ways, in turn: memory of a thaw, owners of a sandbox; `QUICK=1`: a first look
	@./setup test
	@tests/bench/run alternatives $(if $(QUICK),--quick)

bench-report: ## render docs/benchmarks.md and the README's ratios from target/bench; `CHECK=1`: only say which results must be measured again
	@cargo build --release --quiet --bins
	@$(BIN)/bench-report $(if $(CHECK),--check)

clean: ## remove build products of this tree (the cache stays: $(CACHE))
	cargo clean

.PHONY: help demo test unit e2e e2e-images soak test-package test-containerd test-k8s test-api test-e2b test-quickstart test-lab test-upgrade nightly lint house advisories fuzz deny build kernel install uninstall deb node-image release test-release bench-boot bench-thaw bench-create bench-data bench-devices bench-network bench-image bench-shim bench-host bench-tenants bench-snapshot bench-service bench-alternatives bench-report clean
