# `make help` lists what there is. Needs GNU make and Python 3.11 to 3.13 with its venv module.

VENV := .venv
BIN := $(VENV)/bin
RUNNING := control gpu report
PACKAGES := common cache_manager scheduler gpu_manager torch_shim gateway_ext gpufaas
TYPED := $(wildcard $(PACKAGES) bench hunt compat research tests)
TOOLS := hatchling uv
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet

# make setup PYTHON=/path/to/python3.12 overrides the search.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

# Pins are resolved on the oldest Python supported: what it can install, the newer ones can too.
LOCK_PYTHON ?= python3.11

# The index of PyTorch's wheels for CPUs, for machines without an NVIDIA driver.
TORCH_INDEX ?=

# Passed on to the command that a target runs, as in: make simulate ARGS="--help"
ARGS ?=

# Some machines forbid it; then each of the hundreds of processes of a test run compiles every module.
export PYTHONDONTWRITEBYTECODE :=

# Outside the checkout, as what the tests build once a machine.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpufaas/mypy

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: compiled sizes long-lives long-cores long-leave long-seeds long-campaign long-soak long-papers help setup dev run test test-engines test-long tools soak soak-hour soak-streams lint format compat fuzz fuzz-parsers campaign seeds simulate reproduce bench bench-wake bench-full gpu gpu-kit gpu-rehearsal pictures lock clean FORCE

help: ## List the targets
	@echo 'Usage: make TARGET [ARGS="..."] [PYTHON=python3.12]'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.installed ## Create .venv with what running needs, as pinned (does nothing when current)

dev: $(VENV)/.dev ## The same with what checks and measures the code, which other targets bring themselves

compiled: $(VENV)/.compiled ## Compile the core, as images have it: placements take a quarter of the time (two minutes)

run: setup ## Run everything here, deploy and invoke the examples, stay up (ARGS=--once: stop then)
	@$(BIN)/gpufaas up --examples $(ARGS)

# The first ring: Python alone. Two processes more than cores, as some tests wait.
WORKERS ?= $(shell expr $$(nproc) + 2)

test: dev ## Lint and run the tests that need Python alone (ARGS, if any, goes to pytest instead of "all")
	@words=$$(mktemp) && { nice $(MAKE) lint >"$$words" 2>&1 & linting=$$!; \
	$(BIN)/python -m pytest $(or $(ARGS),--numprocesses $(WORKERS)); tested=$$?; \
	wait $$linting; linted=$$?; cat "$$words"; rm "$$words"; \
	[ $$tested = 0 ] && [ $$linted = 0 ]; }

# The second one: Docker, Kubernetes, NATS, Prometheus, a browser, processes that are killed and
# frozen. One process more than cores, as each of its tests starts several; and a test may take long,
# as they compete.
ENGINE_WORKERS ?= $(shell expr $$(nproc) + 1)
ENGINES := tests/contract/test_job_queue.py tests/contract/test_job_letters.py tests/e2e tests/integration tests/processes bench/engine_tests hunt/engine_tests

test-engines: dev tools ## Run the tests of real engines; what fails runs once more, alone (Debian as root, else it skips)
	@$(BIN)/python -m tests.kit.second_run --timeout 900 \
	  $(or $(ARGS),--numprocesses $(ENGINE_WORKERS) $(ENGINES))

# The third one, for a night: a part of every search, the whole of what the second ring samples.
test-long: dev tools ## Run what takes hours: seeds, parsers, fuzz, faults, soak, programs of others, the papers
	@$(MAKE) --keep-going long-lives long-cores long-seeds long-leave fuzz-parsers fuzz long-campaign long-soak long-papers compat

long-lives: dev
	@HYPOTHESIS_PROFILE=thorough GPUFAAS_COMPILED=off $(BIN)/python -m pytest --numprocesses $(WORKERS) \
	  --timeout 3600 tests/unit/cache_manager tests/unit/scheduler

# What the core alone has to get right, compiled; other tests run it as Python.
long-cores: compiled
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --timeout 3600 \
	  tests/long tests/scenarios tests/unit/cache_manager tests/unit/scheduler

long-seeds:
	@$(MAKE) seeds N=1000

# Prints what each feature costs and what is in its way; `make test` in an unchanged copy, then in one for each that leaves.
long-leave: dev
	@nice $(BIN)/python -m hunt.leave $(ARGS)

long-campaign:
	@$(MAKE) campaign ARGS="--times 1"

long-soak:
	@$(MAKE) soak ARGS="--seconds 600"

long-papers: dev
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --timeout 3600 research/long_tests
	@for paper in thesis sage esg interference tenants; do \
	  $(BIN)/gpufaas reproduce --paper $$paper --out docs || exit 1; \
	done
	@$(BIN)/gpufaas reproduce --policies --out docs
	@git diff --exit-code --stat docs/evaluation.md docs/evaluation

tools: ## Install what the second ring needs beside Python (on Debian, as root; else say what lacks)
	@tests/tools.sh

soak: dev ## A minute of the examples under load: killed all the while, then changed at random
	@GPUFAAS_E2E_SECONDS=60 $(BIN)/python -m pytest tests/e2e/test_chaos.py; killed=$$?; \
	$(BIN)/python -m hunt.soak $(ARGS) && [ $$killed = 0 ]

soak-hour: dev ## An hour of them, changed at random: does anything grow? (ARGS="--seconds 900")
	@nice $(BIN)/python -m hunt.soak --seconds 3600 --keep $(ARGS)

soak-streams: dev ## Ten minutes of a hundred functions of one process, called, loaded and evicted at random
	@nice $(BIN)/python -m bench.streambox soak --seconds 600 $(ARGS)

lint: dev ## Check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports --no-logo

sizes: dev ## Count each package's lines, files and folders, beside what they may be
	@$(BIN)/python -m tests.architecture.sizes

format: dev ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Meant for the night. What a run did is in out/compat.jsonl as it comes; a run that was cut
# off goes on by ARGS=--resume, which also repeats what was wrong.
compat: $(VENV)/.compat ## Run every compatibility program and write docs/compatibility.md
	OMP_NUM_THREADS=1 $(BIN)/python -m compat --all --forked --threads 1 \
	  --parallel $(or $(LANES),$(shell nproc)) --json out/compat.jsonl \
	  --write docs/compatibility.md $(ARGS)

# ARGS="--seconds 600 --first 0": for ten minutes, other cases the further --first is. Then a minute
# for each parser, about 45 minutes on two cores.
fuzz: dev ## Call every operator that programs may name with absurd arguments (ARGS=--help)
	@nice -n 19 $(BIN)/python -m hunt.fuzz --cases 20 --seconds 300 $(ARGS)
	@nice -n 19 $(BIN)/python -m hunt.fuzz --merged --cases 10 --seconds 300 $(ARGS)
	@nice -n 19 $(BIN)/gpufaas exec --devices cpu:1 -- $(BIN)/python -m hunt.fuzz.transfers
	@nice -n 19 $(BIN)/gpufaas exec --devices cpu:1 -- $(BIN)/python -m hunt.fuzz.calls
	@nice -n 19 $(BIN)/python -m hunt.parsers

fuzz-parsers: dev ## Fuzz every parser of what others wrote (ARGS="--seconds 3600 --only NAME")
	@nice -n 19 $(BIN)/python -m hunt.parsers $(ARGS)

# ARGS="--seed 12345 --verbose" replays one; ARGS=--keep goes on where a long run was left.
seeds: dev ## Run N (1000) seeds of the simulated control plane under faults, from FIRST (1) on
	@nice $(BIN)/python -m hunt.seeds --count $(or $(N),1000) --first $(or $(FIRST),1) $(ARGS)

# Meant for nights. What a round showed is in out/campaign.jsonl as it comes, with its commit; the
# next run goes on there. ARGS="--times 3 --only gateway-kill --minutes 30"; ARGS=--list: the faults.
campaign: dev tools ## Break everything a hundred times under load, until something shows (root)
	@$(BIN)/python -m hunt.campaign --write $(ARGS)

simulate: setup ## Run the simulator (ARGS goes to gpufaas simulate)
	@$(BIN)/gpufaas simulate $(ARGS)

reproduce: setup ## Rerun the papers' experiments (ARGS goes to gpufaas reproduce)
	@$(BIN)/gpufaas reproduce $(ARGS)

bench: dev ## Measure, in a few minutes at most
	@$(BIN)/python -m bench.placement $(ARGS)
	@$(BIN)/python -m bench.shim
	@$(BIN)/python -m bench.scheduler
	@$(BIN)/python -m bench.live
	@$(BIN)/python -m bench.gateway --system gpufaas --only calls

bench-wake: dev ## Measure how long functions take to wake, with and without templates
	@$(BIN)/python -m bench.wake $(ARGS)

bench-full: dev ## Measure everything (downloads other systems into the cache folder)
	@$(BIN)/python -m bench.placement --full $(ARGS)
	@$(BIN)/python -m bench.shim --full
	@$(BIN)/python -m bench.scheduler --full
	@$(BIN)/python -m bench.live --full
	@$(BIN)/python -m bench.gateway --full
	@$(BIN)/python -m bench.page --keep
	@$(BIN)/python -m bench.page.drawing --keep

# On a machine with a GPU there may be no .venv: then it is that machine's Python and the kit.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)
KIT_PIP ?= $(BIN)/python -m pip

gpu: $(if $(wildcard $(VENV)/.installed),dev) ## Measure and check everything that needs a GPU, in parts (docs/gpu.md; ARGS=--emulate tries it)
	@$(GPU_PYTHON) -m bench.gpu.kit run $(ARGS)

gpu-kit: dev ## Download into out/gpu-kit what a machine with a GPU may lack
	@$(BIN)/python -m bench.gpu.kit build --pip "$(KIT_PIP)" $(ARGS)

# Downloads torch 2.11 into the cache folder; ARGS="--only A" runs one step (A, B, all, tests, programs).
gpu-rehearsal: dev ## Run all of it emulated in a machine made like a GPU's (root, 5 GB)
	@$(BIN)/python -m bench.gpu.rehearsal $(ARGS)

pictures: dev tools ## Take the pictures of the page that README and docs show (needs Chromium)
	@$(BIN)/python -m bench.page.screenshots

lock: ## Resolve constraints.txt again from pyproject.toml (needs python3.11, or LOCK_PYTHON)
	@$(LOCK_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo 'make lock needs Python 3.11, the oldest supported; set LOCK_PYTHON.' >&2; exit 1; }
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	$(LOCK_PYTHON) -m venv "$$scratch/venv" && \
	"$$scratch/venv/bin/python" $(PIP_INSTALL) --upgrade pip && \
	"$$scratch/venv/bin/python" $(PIP_INSTALL) --dry-run --ignore-installed \
	  --report "$$scratch/report.json" $(TOOLS) -e '.[compat]' && \
	{ echo '# What deploy/install.py installs. Written by `make lock`; do not edit.' && \
	  "$$scratch/venv/bin/python" -c "$$PINS" "$$scratch/report.json"; \
	} > "$$scratch/constraints.txt" && \
	cat "$$scratch/constraints.txt" > constraints.txt
	@echo 'Wrote constraints.txt.'

clean: ## Remove .venv, caches and build outputs (keeps out/)
	rm -rf $(VENV) build common/compiled dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv without a working interpreter (none yet, or its Python was removed) is made again.
$(VENV)/.installed: pyproject.toml constraints.txt $(shell test -x $(BIN)/python || echo FORCE)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(CREATE_VENV); }
	@$(BIN)/python deploy/install.py $(RUNNING) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

# What checks and measures the code, beside it.
$(VENV)/.dev: $(VENV)/.installed
	@$(BIN)/python deploy/install.py dev $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

$(VENV)/.compiled: $(VENV)/.dev $(shell find cache_manager scheduler deploy/compiled -name '*.py')
	@$(BIN)/python -m deploy.compiled
	@touch $@

# The libraries of `make compat` alone, from the same pins.
$(VENV)/.compat: $(VENV)/.dev
	@$(BIN)/python deploy/install.py compat
	@touch $@

# Takes the first Python that is supported and can make environments; else says what is missing.
define CREATE_VENV
tried=''; incomplete=''; created=''; \
for python in $(PYTHONS); do \
  version=$$("$$python" --version 2>/dev/null) || version='not found'; \
  tried="$$tried\n  $$python: $$version"; \
  "$$python" -c '$(SUPPORTED)' 2>/dev/null || continue; \
  if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "Creating $(VENV) with $$version ($$python)"; \
    "$$python" -m venv --clear $(VENV) || exit 1; \
    created=yes; \
    break; \
  fi; \
  incomplete="$${incomplete:-$$python}"; \
done; \
if [ -n "$$created" ]; then :; \
elif [ -n "$$incomplete" ]; then \
  echo "$$incomplete lacks its venv or ensurepip module." >&2; \
  echo 'On Debian or Ubuntu: apt-get install python3-venv' >&2; \
  exit 1; \
else \
  printf "gpufaas needs Python 3.11, 3.12 or 3.13. Tried:$$tried\n" >&2; \
  echo 'Install one, or name it: make setup PYTHON=/path/to/python3.12' >&2; \
  exit 1; \
fi
endef

# Reads pip's installation report and prints one pin a line, without our own project.
define PINS
import json, sys
with open(sys.argv[1], encoding="utf-8") as report:
    found = [item["metadata"] for item in json.load(report)["install"]]
for name, version in sorted((m["name"].lower(), m["version"]) for m in found):
    if name != "gpufaas":
        print(f"{name}=={version}")
endef
lock: export PINS := $(PINS)
