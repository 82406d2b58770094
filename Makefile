# `make train` and `make test` set everything up by themselves; `make` alone lists the targets.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z-]+:' Makefile | tr -d :)

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

train: install  ## train and test a small model on real digits (no download), in about a minute
	$(PY) src/train.py experiment=quickstart

assignment: install  ## the ViT exercise on GPUs, by DDP and by FSDP: S3=s3://… [NODES=2 NODE=0 MASTER=host]
	bash launch/vit_exercise.sh $(ARGS)

test: install-dev  ## the tests of every folder, in some minutes; needs no network, no GPU
	$(PY) -m pytest $(SIDE_BY_SIDE)
SIDE_BY_SIDE := -n 3 --dist worksteal

test-contract: install-dev  ## what users rely on, through the command line: CONTRIBUTING.md has the list
	$(PY) -m pytest -m contract $(SIDE_BY_SIDE) tests $(addprefix --ignore=,$(ALONE))
	$(PY) -m pytest -m contract $(ALONE)

test-all: test-beside test-alone  ## the slow tests: SLURM, two hosts, real S3 servers, killed runs, every recipe

test-beside: install-dev
	$(PY) -m pytest -m slow $(SIDE_BY_SIDE) $(LIMIT) tests $(addprefix --ignore=,$(ALONE))

test-alone: install-dev
	$(PY) -m pytest -m slow $(LIMIT) $(ALONE)
LIMIT = $(if $(MINUTES),--minutes $(MINUTES))# make test-all MINUTES=20: no test begins later
# Tests that wait for something to happen within seconds, or that start many processes
ALONE := $(wildcard $(addprefix tests/,test_two_hosts.py test_slurm.py test_torchrun.py test_ctrl_c.py \
  test_nodes.py lockstep/callbacks lockstep/launch))

test-gpu-sim: install-dev  ## PyTorch's CUDA code on a simulated driver (nullgpu/): all trainers
	$(VENV)/bin/uv pip install -q --python $(PY) --no-deps ./nullgpu
	$(PY) -m pytest $(SIDE_BY_SIDE) nullgpu/tests

test-hydra: install-dev  ## the tests of configs and sweeps with Hydra 1.4 and Optuna 5
	$(VENV)/bin/uv venv -q --clear -p $(PY) $(VENV)/hydra14
	ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages \
	  >$$(echo $(VENV)/hydra14/lib/python*/site-packages)/venv.pth
	if $(VENV)/bin/uv pip install -q --python $(VENV)/hydra14 --no-deps --require-hashes -r launch/hydra.txt; then \
	  PYTHONPATH=$(CURDIR)/src $(VENV)/hydra14/bin/python -m pytest $(SIDE_BY_SIDE) $(WITH_HYDRA); \
	else \
	  echo "The release candidate of Hydra 1.4 cannot be installed here: its tests are skipped."; \
	fi
WITH_HYDRA := $(addprefix tests/,lockstep/config lockstep/commands lockstep/sweeps optimizers)

test-ends: install-dev  ## the contract with the lowest and the newest packages of pyproject.toml's ranges; needs the index
	for end in lowest-direct highest; do \
	  $(VENV)/bin/uv venv -q --clear -p $(PY) $(VENV)/$$end && \
	  $(VENV)/bin/uv pip install -q -p $(VENV)/$$end --resolution $$end . && \
	  $(VENV)/bin/uv pip install -q -p $(VENV)/$$end --group dev && \
	  $(VENV)/$$end/bin/python -m pytest -m contract -o filterwarnings=default -p no:warnings $(SIDE_BY_SIDE) tests || exit 1; \
	done

install: $(VENV)/.installed  ## make .venv with the pinned, hash-checked requirements; DEVICE=auto, cpu, cu126: another build of PyTorch

install-dev: $(VENV)/.installed-dev  ## the same with what tests and checks need

INSTALLED := $(shell cat $(VENV)/.device 2>/dev/null)# the build of PyTorch that is there
DEVICE ?= $(INSTALLED)

FIND_PYTHON := python=$$(for p in python3.12 python3.11 python3.13 python3.14 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && { command -v $$p; break; }; done); \
  [ -n "$$python" ] || { echo "Lockstep needs Python 3.11 to 3.14, and there is none on the PATH."; exit 1; }

$(VENV)/bin/python:
	@$(FIND_PYTHON); \
	"$$python" -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$$python has no venv: install it first, e.g. apt-get install python3-venv"; exit 1; }; \
	"$$python" -m venv $(VENV)

$(VENV)/.installed: requirements.txt $(if $(filter-out $(INSTALLED),$(DEVICE)),another-device) | $(VENV)/bin/python
	@DEVICE="$(DEVICE)" bash launch/install.sh requirements.txt
	@touch $@

another-device:

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@DEVICE="$(DEVICE)" bash launch/install.sh requirements-dev.txt
	@touch $@

check: install-dev  ## format, lint, types
	@{ $(VENV)/bin/ruff format --check src tests benchmarks nullgpu launch && \
	  $(VENV)/bin/ruff check src tests benchmarks nullgpu launch; } || \
	  { echo "make format mends the format, and of lint what ruff can."; exit 1; }
	$(VENV)/bin/mypy
	$(PY) tests/lint.py src tests/lint.py

format: install-dev  ## mend the format, and of lint what ruff can
	$(VENV)/bin/ruff check --fix-only src tests benchmarks nullgpu launch
	$(VENV)/bin/ruff format src tests benchmarks nullgpu launch

docs: install  ## write docs/options.md, every option and key, from the comments in configs/
	$(PY) docs/make_options.py

site: docs $(VENV)/site/.installed  ## build the documentation's web site into site/, its links checked; opens from a disk
	NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/mkdocs build --strict

$(VENV)/site/.installed: launch/site.txt | $(VENV)/bin/python
	$(PY) -m venv $(VENV)/site
	$(VENV)/site/bin/python -m pip install -q --require-hashes -r $<
	@touch $@

lock: install  ## resolve requirements*.txt from pyproject.toml, keeping pins; UPGRADE=torch: its newest in the range
	$(VENV)/bin/uv pip compile $(LOCK) pyproject.toml -o requirements.txt
	$(VENV)/bin/uv pip compile $(LOCK) --group dev -c requirements.txt -o requirements-dev.txt
	grep -oE '^hivemind==[0-9.]+' requirements-hivemind.txt | \
	  $(VENV)/bin/uv pip compile $(LOCK) -c requirements.txt - -o requirements-hivemind.txt
	grep -oE '^pip-audit==[0-9.]+' launch/audit.txt | $(VENV)/bin/uv pip compile $(LOCK) - -o launch/audit.txt
	grep -oE '^mkdocs(-material)?==[0-9.]+' launch/site.txt | $(VENV)/bin/uv pip compile $(LOCK) - -o launch/site.txt
	grep -oE '^[a-z-]+==[0-9.rc]+' launch/hydra.txt | \
	  $(VENV)/bin/uv pip compile $(LOCK) --no-deps - -o launch/hydra.txt
	grep -oE '^uv==[0-9.]+' launch/uv.txt | $(VENV)/bin/uv pip compile $(LOCK) - -o launch/uv.txt
LOCK := -q -p 3.11 --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links $(addprefix -P ,$(UPGRADE))

audit: install  ## ask the package index's advisories about every pinned version; needs its network
	$(VENV)/bin/uv venv -q --clear $(VENV)/audit
	$(VENV)/bin/uv pip install -q --python $(VENV)/audit --require-hashes -r launch/audit.txt
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off \
	  -r requirements.txt -r requirements-hivemind.txt

prove: install  ## is a training the same after a kill and on two ranks? ARGS="experiment=mine --checks=resume,ddp"
	$(PY) src/prove.py $(or $(ARGS),experiment=quickstart)

parity: install-dev  ## every strategy against one process, in float64, with seeded faults
	$(PY) benchmarks/parity.py

bench: install-dev  ## measure this machine against peers and goals (about an hour), into benchmarks/results
	$(PY) benchmarks/step_time.py
	$(PY) benchmarks/start.py
	$(if $(CIFAR),$(PY) benchmarks/input_path.py --root $(CIFAR))
	$(PY) benchmarks/speedrun.py $(if $(CIFAR),--root $(CIFAR))
	$(if $(MNIST),$(PY) benchmarks/template.py --root $(MNIST),$(if $(FASHION),$(PY) benchmarks/template.py --fashion-root $(FASHION)))
CIFAR ?=# make bench CIFAR=folder that holds cifar-10-batches-py
MNIST ?=# make bench MNIST=folder in torchvision's layout
FASHION ?= $(wildcard /usr/share/datasets/fashion-mnist)# where Debian's package dataset-fashion-mnist puts it

bench-gpu: install  ## measure one GPU in ten minutes, into benchmarks/results/gpu.json; what it measures: benchmarks/gpu.py
	$(PY) benchmarks/gpu.py --out benchmarks/results

soak: install-dev  ## kill runs at random moments and compare their weights; PIECE="kills jobscript" COUNT=60 SEED=1
	$(PY) benchmarks/soak.py $(PIECE) $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT))

logbook: install  ## write the pages of the runs in logbook/ anew
	$(PY) src/logbook.py build

new:  ## make a project of your own: make new NAME=birds DIR=../birds
	@$(FIND_PYTHON); "$$python" launch/project.py new "$(NAME)" "$(DIR)"

wheel: install  ## build and check wheel and sdist, into dist/
	rm -rf dist
	$(VENV)/bin/uv build -q -p $(PY) --no-build-isolation -o dist
	@$(PY) launch/check_wheel.py dist

release: wheel  ## name what the changelog calls unreleased, commit, tag and build it: make release VERSION=1.0.0
	@$(PY) launch/release.py "$(VERSION)"
	@$(MAKE) wheel

clean:  ## remove caches; runs and .venv stay
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -r {} +
	rm -rf .pytest_cache .ruff_cache .mypy_cache
