# Thin on purpose: the work is in scripts/. Every target does the set-up it needs; a second run finds it done.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-e2e test-all test-gpu test-rdma test-ucx-1.13 test-aarch64 test-upgrade test-vllm-versions fuzz asan mutants check faults soak bench bench-peers bench-handoff bench-serving wheel dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv with vLLM's CPU build, UCX and kvpipe in release mode
	@scripts/setup

demo: setup ## 1 prefill + 1 decode instance beside an undivided one: the same answers?
	@.venv/bin/python examples/disagg_prefill/demo.py

test: setup ## what a change is tested with: all tests of Rust and Python that are not slow, and real vLLM instances
	@scripts/test

test-slow: setup ## all other tests: long properties, peers killed and stopped at every stage, all groups of vLLM instances
	@scripts/test slow

test-e2e: setup ## every end-to-end test with real vLLM instances
	@scripts/test e2e

test-all: setup ## all tests, those below and a short soak included, one target after the other; two hours
	@for target in test test-slow test-rdma test-ucx-1.13 test-vllm-versions fuzz asan mutants faults 'soak MINUTES=10'; do \
		echo "make $$target" >&2; $(MAKE) --no-print-directory $$target || exit 1; \
	done

test-gpu: setup ## the tests that need a CUDA device; skipped with the reason where there is none
	@UCX_MEM_EVENTS=y scripts/test rust -p kvpipe-ucx --lib on_a_gpu -- --nocapture
	@UCX_MEM_EVENTS=y scripts/test python tests/gpu

test-rdma: setup ## a named part of the tests over RDMA verbs, on Debian's UCX, in QEMU
	@tests/rdma/run

test-ucx-1.13: setup ## the transport's tests on the oldest UCX that is accepted, Debian 12's, over TCP
	@scripts/test-ucx-1.13

test-aarch64: setup ## tests of the wheel for aarch64 without vLLM, on x86_64 in QEMU's user mode; needs dist/ to have it
	@scripts/test-aarch64

test-upgrade: setup ## the last release, or landed build, replaced by this one under load, with real vLLM
	@scripts/build-of "$$(sed -n 's/^OLDER_BUILD = "\(.*\)"/\1/p' tests/e2e/test_upgrade.py)"
	@scripts/test e2e -s tests/e2e/test_upgrade.py

test-vllm-versions: setup ## the connectors' tests with each supported vLLM beside the installed one, and instances of the oldest
	@scripts/test vllm-versions

fuzz: ## what reads bytes of peers, with libFuzzer and AddressSanitizer: each target for SECONDS=60
	@scripts/fuzz $(or $(SECONDS),60)

asan: setup ## the Rust tests of the UCX wrapper, the core and the fuzz harness under AddressSanitizer
	@scripts/asan

mutants: setup ## files that keep wrong KV from counting, broken in each way that cargo-mutants and mutmut know: does a test fail? FILES= are some of them
	@.venv/bin/python scripts/mutants $(FILES)

check: setup ## formatting, lints, types, stubs, dependency direction
	@scripts/check

faults: setup ## peers killed, stopped, cut off, slow ... at every stage, ROUNDS=20 of each, and how soon that is known
	@.venv/bin/python -m tests.faults --rounds $(or $(ROUNDS),20)

soak: setup ## random tensors, blocks, lookups and faults for MINUTES=30, all content verified, from a printed SEED
	@.venv/bin/python -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

bench: setup ## tensors, blocks, latency and lookups beside ucx_perftest and memcpy
	@cargo build --quiet --release --locked --example bare_loop -p kvpipe-ucx
	@.venv/bin/kvpipe bench pipe
	@.venv/bin/kvpipe bench blocks
	@.venv/bin/kvpipe bench latency
	@.venv/bin/kvpipe bench lookup

bench-peers: setup ## kvpipe beside NIXL, ucxx, Mooncake, gloo, ZeroMQ and ucx_perftest
	@cargo build --quiet --release --locked --example bare_loop -p kvpipe-ucx
	@scripts/bench-peers
	@.venv/bin/kvpipe bench peers

.PHONY: .cache/nixl
.cache/nixl:
	@.venv/bin/uv pip install --quiet --python .venv/bin/python --target $@ --no-deps nixl nixl-cu12 || echo 'benchmarks: without NIXL' >&2

bench-handoff: setup .cache/nixl ## real vLLM through prefill and decode, beside NixlConnector and one instance; 45 minutes, 22 GB
	@.venv/bin/kvpipe bench handoff

bench-serving: setup .cache/nixl ## many requests at once to real vLLM, beside undivided instances and NixlConnector; 100 minutes, 20 GB
	@.venv/bin/kvpipe bench serving

wheel: ## one wheel for CPython 3.11 and newer on Linux of this architecture with glibc 2.28 or newer, in dist/
	@scripts/wheel

dist: setup ## what a release has, in dist/: wheels for x86_64 and aarch64, the source distribution, all of them checked
	@scripts/dist

clean: ## remove everything that the other targets made
	rm -rf target dist .venv .venv-peers .venv-wheel .cache .mypy_cache .pytest_cache .ruff_cache
	find python bench tests examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f python/kvpipe/_kvpipe*.so
