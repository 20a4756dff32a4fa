# `make demo` and `make test` need Python >= 3.10, a C++ compiler and make; the rest goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup setup-integrations browser fuzzer demo test test-long torch-for-nccl frameworks-for-nccl test-nccl test-upstream lint prose bench gpu docs dist clean

setup: $(INSTALLED)

# A .venv whose pip does not run was left half made: it is made again.
define make-venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
    { echo "rankcall needs Python >= 3.10: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(make-venv)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints.txt -e '.[torch,report,serve,mcp,rpc,examples,dev,nvtx,prometheus,otel,stacks,lightning,accelerate,remote,plot]'
	@touch $@

# The tests of the HTML report, the live page and the Perfetto trace run in Chromium, or are skipped.
browser:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

# With clang, tests/native/test_rpc_fuzz.py steers by coverage. Any other compiler fuzzes without.
fuzzer:
	@command -v clang++ >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends clang libclang-rt-dev; }

# The launchers and frameworks that tests/multiproc/test_frameworks.py and test_notebook.py start, some 400 MB; a test
# is skipped if its package is missing. At run level 1, Debian does not start the daemons that it installs.
DEBIAN := openmpi-bin slurmctld slurmd slurm-client munge prometheus
setup-integrations: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[integrations]'
	@# NVRx asks for the package pynvml, at which torch warns in each process that finds it. So it has a folder of its own, which
	@# tests/multiproc/test_nvrx.py looks for, and nothing of what it asks for but what it needs. It has wheels for x86-64 alone.
	@test -d .venv/nvrx || $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target .venv/nvrx \
	    nvidia-resiliency-ext==0.4.1 nvidia-ml-py defusedxml || echo "not installed, because there is no wheel for it: NVRx" >&2
	@# DeepSpeed compiles on first use. No test's time-out is for a compiler.
	@PATH="$(CURDIR)/$(BIN):$$PATH" DS_ACCELERATOR=cpu $(BIN)/python -c \
	    'from deepspeed.comm.torch import build_shm_op; build_shm_op()' >/dev/null
	@if dpkg-query -W $(DEBIAN) >/dev/null 2>&1; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	    apt-get install -y -qq --no-install-recommends $(DEBIAN); \
	else echo "not installed, because this needs apt-get and root: $(DEBIAN)" >&2; fi

# Four ranks train on real images; rank 2 reads slowly, 20 ms more a step, and the report names it. If there is no .venv yet, the
# demo makes one with what it needs alone, and not with what the tests need.
DEMO := .venv/.demo
$(DEMO): pyproject.toml constraints.txt
	$(make-venv)
	@echo "1/3 installing torch, rankcall and scikit-learn into .venv, which takes some minutes"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[torch,report,examples]'
	@touch $@

demo: export OMP_NUM_THREADS := 1
demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))
	@echo "2/3 training with four ranks, of which rank 2 is slow"
	$(BIN)/rankcall run --nproc-per-node 4 examples/train_digits.py --slow-rank 2 --slow-ms 20
	@echo "3/3 reading the records"
	$(BIN)/rankcall report
	$(BIN)/rankcall report -o report.html

# What is compiled is compiled first: no test's time-out is for a compiler. If Python must write no bytecode, each of
# the processes that the tests start would compile all modules again, and pytest would rewrite every test file.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(BIN)/rankcall build || true
	$(BIN)/python -m compileall -q src tests benchmarks examples tools || true
	$(BIN)/python -m pytest -q -m 'not slow' -n 6 --dist worksteal

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -q --hypothesis-profile=long --timeout=1800 -o faulthandler_timeout=1700

# PyTorch's own Gloo tests, with recording on and off, and its RPC tests on both back ends.
test-upstream: $(INSTALLED)
	$(BIN)/python -m pytest -q --timeout=3000 -o faulthandler_timeout=2900 tests/upstream

# rankcall on torch's NCCL, and the tests of the simulated devices that it runs on. They need a CUDA build of torch, so
# they have an environment of their own, of 6 GB: `make test-nccl TORCH=2.15.0`.
TORCH := 2.14.1
NCCL := .venv-nccl/$(TORCH)

# `===`: a version with a local part, such as 2.13.0+cpu, is another build. torch asks for an nvtx of its own. The
# environment variable replaces whatever constraints pip is configured with. torch comes first and alone: if it cannot
# be had, .ci/run does without these tests.
INSTALL_FOR_NCCL = PIP_CONSTRAINT=$(CURDIR)/$(NCCL)/constraints.txt $(NCCL)/bin/python -m pip install \
    --disable-pip-version-check --quiet

torch-for-nccl: $(NCCL)/.torch
$(NCCL)/.torch: constraints.txt
	@$(NCCL)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(NCCL)
	grep -v -E '^(torch|nvidia-nvtx)==' constraints.txt > $(NCCL)/constraints.txt
	$(INSTALL_FOR_NCCL) torch===$(TORCH)
	@touch $@

$(NCCL)/.installed: $(NCCL)/.torch pyproject.toml devices/pyproject.toml
	$(INSTALL_FOR_NCCL) torch===$(TORCH) -e '.[torch,report,rpc]' -e devices hypothesis numpy pytest pytest-timeout pytest-xdist
	@touch $@

# What tests/nccl/test_launched_frameworks.py starts.
frameworks-for-nccl: $(NCCL)/.installed
	$(INSTALL_FOR_NCCL) torch===$(TORCH) lightning deepspeed transformers accelerate

# `make test-nccl FAST=` runs the slow tests as well: all scenarios of hangs with both captures, and frameworks.
FAST := -m 'not slow'

test-nccl: export PYTHONDONTWRITEBYTECODE :=
test-nccl: export PATH := $(CURDIR)/$(NCCL)/bin:$(PATH)
test-nccl: $(NCCL)/.installed
	devices build
	rankcall build
	pytest -q -n 4 --dist worksteal $(FAST) tests/nccl
	devices exec --gpus 2 -- pytest -q $(wildcard tests/multiproc/test_*gpu.py)
	cd devices && pytest -q -n 4 --dist worksteal tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/shape.py src/rankcall --max-in-circles 0 --max-vague 0

# How often the texts have a turn of phrase that readers stumble over. A report: it has no limits.
prose: $(INSTALLED)
	$(BIN)/python tools/prose.py src tests docs README.md CHANGELOG.md CONTRIBUTING.md

# The site is in build/site; its pages open from the disk. The variable silences an advertisement
# that the theme prints. The newest versions of these packages need Python 3.11.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site: build/site/index.html"

# The wheels and the sdist are in dist/. Each is tried in a fresh environment; nothing is downloaded. The wheels for one
# Python carry a recorder for the torch of each of these environments.
TORCH_FOR_WHEELS := .venv
dist: $(INSTALLED)
	$(BIN)/python tools/try_dist.py $(foreach place,$(TORCH_FOR_WHEELS),--torch $(place))

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overhead.py --json
	$(BIN)/python benchmarks/hooks.py --json
	$(BIN)/python benchmarks/join.py --json
	$(BIN)/python benchmarks/training.py --json
	$(BIN)/python benchmarks/diagnosis.py --json
	$(BIN)/python benchmarks/agreement.py --json
	$(BIN)/python benchmarks/analysis.py --ranks 256 --collectives 4000 --json
	$(BIN)/python benchmarks/export.py --json
	$(BIN)/python benchmarks/trace.py --json
	$(BIN)/python benchmarks/rpc.py --json
	$(BIN)/python benchmarks/store.py --json
	$(BIN)/python benchmarks/serve.py --json
	$(BIN)/python benchmarks/startup.py --json

# What to run first on a GPU; see docs/performance.md. What the machine lacks is skipped.
gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv .venv-nccl build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
