# make demo and make test need Python >= 3.10 and make, and set up the rest in .venv. The first run takes minutes.
# make test-vllm and make test-sglang do the same with a real engine, make test-ray with Ray, make test-harnesses with lm-eval,
# TRL and inspect_ai, and make test-tensordict with the newest tensordict, each in its own environment; make test-hosts uses
# those of the engines.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := . $(wildcard plugins/*)
EDITABLE := $(addprefix --editable ,$(wildcard plugins/*) tests/packages/toy_backend)
METADATA := pyproject.toml $(wildcard plugins/*/pyproject.toml) tests/packages/toy_backend/pyproject.toml

# Run the tests in one process per core, but not in more than eight: each takes more than 1 GB.
PARALLEL := --numprocesses logical --maxprocesses 8 --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Check the chosen interpreter's version, and say what to type if it is too old.
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	"Python 3.10 or newer is needed. This is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit test-thorough test-families test-tensordict test-vllm test-sglang test-ray test-harnesses test-hosts test-gpu bench bench-quick bench-gpu
.PHONY: install test-faults docs drawings wheels sbom pins format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 23

demo: install ## train a tiny model in seconds, chat with it and score the chat
	$(BIN)/python examples/demo.py

test: lint types unit ## run everything that a change must pass

lint: install ## check the style, and which module imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install ## run mypy in strict mode
	$(BIN)/mypy

unit: install ## run the tests, including the examples in the README and in docstrings
	$(BIN)/python -m pytest -m "not thorough" $(PARALLEL)

test-thorough: install ## run what `make test` leaves out: more of what its tests show; takes minutes
	$(BIN)/python -m pytest -m thorough $(PARALLEL)

test-families: install ## compare the transformers plugin with the plain forward of every model type; takes minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families

test-tensordict: .venv-tensordict/.installed ## test everything that holds tensors on the newest tensordict, which TorchRL does not support yet
	.venv-tensordict/bin/python -m pytest $(PARALLEL) \
		tests/tensors tests/containers tests/kl tests/policy tests/backend tests/interop tests/test_docs.py

test-vllm: .venv-vllm/.installed ## test the vLLM plugin on a real vLLM, on the CPU; takes minutes
	.venv-vllm/bin/python -m pytest tests/engines/vllm

test-sglang: .venv-sglang/.installed ## test the SGLang plugin on a real SGLang server, on the CPU; takes minutes
	.venv-sglang/bin/python -m pytest tests/engines/sglang

test-ray: .venv-ray/.installed ## test the Ray plugin on a Ray of this machine; takes minutes
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest tests/engines/ray

test-harnesses: .venv-harnesses/.installed ## test the adapters for lm-eval, TRL and inspect_ai with these libraries; takes minutes
	OMP_NUM_THREADS=1 .venv-harnesses/bin/python -m pytest tests/harnesses

test-hosts: install .venv-vllm/.installed .venv-sglang/.installed .venv-harnesses/.installed ## test engines in processes of their own environments; takes minutes
	CORELM_TEST_HOSTS=1 $(BIN)/python -m pytest tests/engines/hosted
	CORELM_TEST_HOSTS=1 OMP_NUM_THREADS=1 .venv-harnesses/bin/python -m pytest tests/harnesses/test_*_hosted.py \
		tests/harnesses/test_lm_eval.py

test-faults: install .venv-vllm/.installed .venv-sglang/.installed .venv-ray/.installed ## kill and stop the processes of fleets under load, two minutes for each engine; clients of a server hang up
	for each in .venv/bin/python:tests/fleet/test_fleet_faults.py .venv-vllm/bin/python:tests/engines/vllm/test_fleet.py \
		.venv-sglang/bin/python:tests/engines/sglang/test_fleet.py \
		.venv-ray/bin/python:tests/engines/ray/test_faults.py .venv-ray/bin/python:tests/engines/ray/test_conformance.py; do \
		CORELM_FAULT_SECONDS=120 CORELM_FLEET_KIT=1 $${each%%:*} -m pytest -s $${each#*:} || exit 1; done
	CORELM_FAULT_SECONDS=60 $(BIN)/python -m pytest -s tests/serving/test_load.py

test-gpu: install ## test the transformers plugin with its models on a GPU; takes minutes, and needs a torch that has CUDA
	CORELM_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/plugins/transformers_backend $(PARALLEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families --device cuda

bench: install ## compare the cost with that of the bare engines and of TorchRL; takes an hour or more
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

bench-quick: install ## run fewer and smaller benchmarks, in a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks --quick

bench-gpu: install ## measure everything that one GPU can show, in under 40 minutes; skips what is not installed
	$(BIN)/python -m benchmarks.gpu

format: install ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## build the site into docs/_build; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --builder html docs docs/_build

drawings: ## remake the pictures in docs/drawings from their .dot files; needs graphviz
	for drawing in docs/drawings/*.dot; do dot -Tsvg $$drawing -o $${drawing%.dot}.svg || exit 1; done

wheels: install ## build the published packages into wheels/
	rm -rf wheels
	for package in $(PACKAGES); do $(BIN)/python -m build --no-isolation --outdir wheels $$package || exit 1; done

sbom: install ## write a bill of materials (CycloneDX) of each file of pins into sbom/
	$(BIN)/python .ci/sbom.py sbom

pins: ## write the versions in the environments into constraints/
	$(BIN)/python .ci/pins.py > constraints/cpu.new && mv constraints/cpu.new constraints/cpu.txt
	for engine in vllm sglang; do \
		.venv-$$engine/bin/python .ci/pins.py --all > constraints/$$engine.new && \
		mv constraints/$$engine.new constraints/$$engine-cpu.txt || exit 1; done
	.venv-harnesses/bin/python .ci/pins.py --all > constraints/harnesses.new && \
		mv constraints/harnesses.new constraints/harnesses.txt

install: $(INSTALLED) ## set up .venv

$(INSTALLED): constraints/cpu.txt $(METADATA)
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --requirement constraints/cpu.txt
	$(BIN)/python -m pip install --no-build-isolation --constraint constraints/cpu.txt \
		--editable ".[transformers,http,cli,serve]" $(EDITABLE)
	touch $@

# The pins of cpu.txt, but for TorchRL, Triton and the lines that constraints/tensordict.txt replaces.
.venv-tensordict/.installed: constraints/cpu.txt constraints/tensordict.txt $(METADATA)
	@$(CHECK_PYTHON)
	rm -rf .venv-tensordict
	$(PYTHON) -m venv .venv-tensordict
	grep -vE '^(tensordict|torchrl|triton)\b' constraints/cpu.txt | cat - constraints/tensordict.txt >.venv-tensordict/pins.txt
	.venv-tensordict/bin/python -m pip install torch==2.13.0
	.venv-tensordict/bin/python -m pip install --requirement .venv-tensordict/pins.txt
	.venv-tensordict/bin/python -m pip install --no-build-isolation --constraint .venv-tensordict/pins.txt \
		--editable ".[transformers,http,cli,serve]" $(EDITABLE)
	touch $@

# The pins of cpu.txt, and those of ray.txt. No other engine is here.
.venv-ray/.installed: constraints/cpu.txt constraints/ray.txt $(METADATA)
	@$(CHECK_PYTHON)
	rm -rf .venv-ray
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install torch==2.13.0
	.venv-ray/bin/python -m pip install --constraint constraints/cpu.txt --requirement constraints/ray.txt \
		hatchling pytest hypothesis
	.venv-ray/bin/python -m pip install --no-build-isolation --constraint constraints/cpu.txt --editable ".[cli,http,serve]" \
		--editable plugins/transformers_backend --editable plugins/ray_backend --editable tests/packages/toy_backend
	touch $@

# lm-eval, TRL and inspect_ai ask for other versions than cpu.txt has, so harnesses.txt lists everything.
.venv-harnesses/.installed: constraints/harnesses.txt $(METADATA)
	@$(CHECK_PYTHON)
	rm -rf .venv-harnesses
	$(PYTHON) -m venv .venv-harnesses
	.venv-harnesses/bin/python -m pip install torch==2.13.0
	.venv-harnesses/bin/python -m pip install --requirement constraints/harnesses.txt
	.venv-harnesses/bin/python -m pip install --no-deps --no-build-isolation --editable . $(EDITABLE)
	touch $@

# The engines require GPU libraries that a CPU cannot use, so pip ignores their requirements (--no-deps), and the constraints
# list everything. prepare.py adds what the engine's own wheels lack on a CPU.
.venv-%/.installed: constraints/%-cpu.txt $(METADATA) $(wildcard tests/engines/*/cpu/prepare.py)
	@$(CHECK_PYTHON)
	rm -rf .venv-$*
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install torch==2.13.0
	.venv-$*/bin/python -m pip install --no-deps --requirement constraints/$*-cpu.txt
	.venv-$*/bin/python -m pip install --no-deps --no-build-isolation --editable . $(EDITABLE)
	if [ -f tests/engines/$*/cpu/prepare.py ]; then .venv-$*/bin/python tests/engines/$*/cpu/prepare.py; fi
	touch $@

clean: ## remove build outputs and environments
	rm -rf $(VENV) .venv-tensordict .venv-vllm .venv-sglang .venv-ray .venv-harnesses wheels sbom docs/_build dist build reports demo-output grpo-output distill-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
