# Names for the usual commands. Each installs what a fresh Debian or Ubuntu machine lacks.
.PHONY: demo serve dist test test-arm64 test-cuda loom asan fuzz faults deny kernels check bench bench-peers paper datasets golden \
	manuals setup release fmt

MODEL  := artifacts/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
BUNDLE := artifacts/smollm2/smollm2.f16.lsb
VOCABS := artifacts/vocabs/ggml-vocab-qwen2.gguf
NVRTC  := artifacts/nvrtc
TARGET := $(or $(CARGO_TARGET_DIR),target)
MINUTES := 10
PAPER  := artifacts/paper
PEERS  := artifacts/peers
HOST   = $(shell rustc -vV | sed -n 's/host: //p')
PROMPT := Once upon a time, in a small village by the sea, there lived

demo: release $(BUNDLE)   ## Fetch a real model, prepare it, generate text in a third of its size.
	$(TARGET)/release/ls-run generate $(BUNDLE) --memory 96MiB --context 512 --echo -n 100 --prompt "$(PROMPT)"

serve: $(BUNDLE)   ## Serve that model on http://127.0.0.1:8080, with a page to talk with it.
	cargo run --release --locked -p ls-serve -- $(BUNDLE) --memory 160MiB --context 1024

# Only ls-run is built for release here: ls-prep takes longest, and what the tests have built of it makes the same bundle.
# All but the last line build the whole workspace, so that no crate is built twice with other features of what it uses.
test: loom $(MODEL) $(VOCABS) $(NVRTC)/cuda12   ## All tests, those on the real model too.
	cargo test --workspace --locked --features ls-prep/lapack
	cargo test --workspace --locked --features ls-prep/lapack --test vocabs --test compile -- --ignored
	test -e $(BUNDLE) || $(TARGET)/debug/ls-prep import $(MODEL) --out $(BUNDLE)
	cargo test --release --locked -p ls-run --test real_model -- --ignored --test-threads 1

test-arm64: setup $(BUNDLE)   ## The kernels' tests and the program for 64-bit Arm, under qemu.
	tools/cross-arm64.sh
	tools/cross-arm64.sh build --release -p ls-run
	tools/test-arm64.sh $(BUNDLE)

dist: setup   ## Release archives of ls-run for x86-64 and 64-bit Arm, into artifacts/dist.
	tools/dist.sh

loom: setup   ## Every interleaving of the flags' models, and of wrong ones that must fail.
	RUSTFLAGS="--cfg loom" cargo test --quiet --locked -p ls-sync --test loom --target-dir $(TARGET)/loom

fuzz: setup   ## Feed hostile bytes to everything that reads what others wrote, for MINUTES.
	cargo run --locked -p ls-fuzz -- --minutes $(MINUTES) --findings $(TARGET)/fuzz

faults: setup   ## A thousand schedules of faults of the disk over `ls-prep all`.
	cargo test --locked -p ls-prep --test faults -- --ignored --nocapture

# Leaks are none of its business: a ring of reads that cannot be ended is left to the kernel, which may still write there.
asan: setup   ## The runtime's tests under the address sanitizer.
	ASAN_OPTIONS=detect_leaks=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" cargo test --quiet --locked --target $(HOST) \
		--target-dir $(TARGET)/asan -p ls-sync -p ls-io -p ls-hash -p ls-cpu -p ls-bundle -p ls-cache -p ls-engine

deny: setup   ## Licences, sources, bans and advisories of all dependencies (deny.toml).
	@command -v cargo-deny > /dev/null || cargo install --locked cargo-deny
	cargo deny --locked check

test-cuda: setup   ## The CUDA backend's tests, on an NVIDIA GPU.
	cargo test --locked -p ls-cuda --test conformance --test stages -- --ignored --test-threads 1
	cargo test --locked -p ls-engine --test devices cuda -- --ignored

kernels: $(NVRTC)/cuda11 $(NVRTC)/cuda12   ## Compile the CUDA kernels that are built in; after every change of them.
	cargo run --locked -p ls-cuda --example kernels -- $^
	cargo fmt -p ls-cuda

check: setup   ## Formatting, lints, tidiness.
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets --locked --features ls-prep/lapack -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --features ls-prep/lapack
	cargo test --quiet --locked -p ls-tidy

bench: release $(BUNDLE)   ## Speed at several budgets, beside what the machine allows.
	for memory in 400MiB 192MiB 128MiB 96MiB; do $(TARGET)/release/ls-run bench $(BUNDLE) --memory $$memory; done

bench-peers: setup $(MODEL)   ## Build llama.cpp, try to install AirLLM and mistral.rs, to be measured by `make paper`.
	tools/peers.sh $(PEERS) $(MODEL)

# Best on a machine that does nothing else. Stopped anywhere, it goes on.
paper: release $(PAPER)/smollm2.lsb   ## The paper's tables and figures, measured here (QUICK=1: less of them).
	$(TARGET)/release/ls-prep paper $(PAPER)/smollm2.lsb --source $(MODEL) --recipe tools/paper/paper.toml \
		--text datasets/text/*.txt --out $(PAPER) $(if $(QUICK),--quick) \
		$(if $(wildcard $(PEERS)/model.f16.gguf),--peers $(PEERS) --peer-model $(PEERS)/model.f16.gguf)

$(PAPER)/smollm2.lsb: $(MODEL) | release datasets
	mkdir -p $(PAPER)
	$(TARGET)/release/ls-prep all $(MODEL) --out $@ --recipe tools/paper/paper.toml

datasets: setup   ## Unpack real English text from Debian packages into datasets/text.
	cargo run --release --locked -p ls-prep -- datasets fetch

golden: setup   ## Regenerate the golden files; review the diff.
	cargo run --locked -p ls-bundle --example golden

manuals:   ## Man pages and shell completions, into artifacts/manuals.
	cargo run --locked -p ls-serve --example manuals artifacts/manuals
	cargo run --locked -p ls-prep -- manuals artifacts/manuals

fmt:
	cargo fmt --all

setup:
	@tools/setup.sh

$(MODEL): | setup
	python3 tools/fetch-smollm2.py $(dir $(MODEL))

$(NVRTC)/cuda11 $(NVRTC)/cuda12: | setup
	python3 tools/fetch-nvrtc.py $(NVRTC) $(notdir $@)

$(VOCABS): | setup
	python3 tools/fetch-vocabs.py $(dir $(VOCABS))

release: setup
	cargo build --release --locked -p ls-run -p ls-prep

$(BUNDLE): $(MODEL) | release
	$(TARGET)/release/ls-prep import $(MODEL) --out $(BUNDLE)
