# make demo and make test need Python >= 3.11 and make, and set up the rest in .venv. make check adds to it what every change must
# pass. Engines and other libraries have environments with their own versions: .venv-vllm, .venv-sglang, .venv-ray, .venv-harnesses,
# .venv-newest, .venv-llamacpp.

PYTHON ?= python3
# The build of torch: a version, a file, or what else pip takes.
TORCH ?= torch==2.13.0
NEWEST_TORCH ?= torch
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := . $(patsubst %/pyproject.toml,%,$(wildcard kits/*/pyproject.toml plugins/*/pyproject.toml apps/*/pyproject.toml))
RUN := . kits/engine kits/testing plugins/transformers_backend
EXTRA := $(filter-out $(RUN),$(PACKAGES))
METADATA := $(addsuffix /pyproject.toml,$(PACKAGES))

# What make test runs. tests/mutants reads this list.
TEST := tests/core tests/kits/testing tests/kits/engine/test_sampling.py tests/plugins/transformers_backend \
	tests/apps/fleet/test_state.py tests/apps/fleet/test_stateful.py tests/apps/fleet/test_parts.py \
	tests/test_docs.py tests/test_imports.py tests/real/test_briefly.py
# What make check runs: all folders but those that need an engine or a harness, or hold no tests.
CHECK := $(addprefix tests/,core kits plugins apps examples real) $(wildcard tests/test_*.py)
# Where the newest libraries are tried. SELECT=1 keeps the files about what transformers and PEFT do.
PLUGIN := tests/plugins/transformers_backend
NEWEST := tests/test_third_party_names.py $(addprefix tests/core/,tensors containers kl policy) tests/kits/testing/test_kit.py tests/apps/interop \
	tests/plugins/openai_backend/test_protocol.py tests/apps/serve/test_chat.py \
	$(if $(SELECT),$(addprefix $(PLUGIN)/test_,adapters.py cache.py conformance.py families.py generation.py opening.py peft_methods.py \
	scoring.py self_test.py weights.py wrapped.py),$(PLUGIN)) \
	$(addprefix tests/harnesses/test_,trl_rollouts.py lm_eval.py inspect_ai.py)

# Run the tests in one process per core, but not in more than eight: each takes more than 1 GB.
PARALLEL := --numprocesses logical --maxprocesses 8 --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Check the chosen interpreter's version, and say what to type if it is too old.
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"Python 3.11 or newer is needed. This is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
# Install what files of pins list, except torch, which TORCH names. The files list all requirements of what they list, hence
# --no-deps. Lines with -r are dropped: the rules below pass every file. Python compiles what it imports, hence --no-compile.
PINS = sed -E '/^(torch==|-r |\#)/d' $(1) | $(2)/python -m pip install --no-compile --no-deps --requirement /dev/stdin
EDITABLE = $(2)/python -m pip install --no-build-isolation --no-deps $(foreach each,$(1),--editable $(each))

.DEFAULT_GOAL := help
# Engines share two cores and a lot of memory: one target at a time.
.NOTPARALLEL:
.PHONY: help demo test test-core test-real check nightly lint types budgets mutants test-families test-newest test-vllm test-sglang test-ray test-harnesses
.PHONY: .venv-newest/.installed test-llamacpp test-hosts test-faults test-gpu bench bench-quick bench-real bench-gpu format docs notebooks drawings wheels dist sbom pins install clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 23

demo: $(VENV)/.run ## train a tiny model in seconds, chat with it and score the chat
	$(BIN)/python examples/demo.py

test: $(VENV)/.test ## run the tests of the kernel and of the transformers plugin; three minutes after set-up
	$(BIN)/python -m pytest -m "not process and not nightly" $(PARALLEL) $(TEST)

test-core: $(VENV)/.run constraints/test.txt ## run the tests of the kernel with the transformers plugin and core-testing, and nothing else of ours
	$(call PINS,constraints/test.txt,$(BIN))
	$(BIN)/python -m pytest -m "not process and not nightly" $(PARALLEL) tests/core tests/kits/testing tests/plugins/transformers_backend/test_conformance.py

test-real: $(VENV)/.test ## compare a trained model's numbers with its plain forward; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real

check: lint types budgets ## run what every change must pass: make test and everything that needs no environment of an engine; 15 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families --sample
	$(BIN)/python -m pytest -m "not nightly" $(PARALLEL) $(CHECK)

# Everything: the tests of make check with more examples and with what is marked nightly, and all that follows. Hours.
nightly: lint types mutants test-families test-faults test-vllm test-sglang test-ray test-harnesses test-hosts test-newest ## run everything; hours
	HYPOTHESIS_PROFILE=nightly CORELM_WHOLE_KIT=1 $(BIN)/python -m pytest $(PARALLEL) $(CHECK)
	for version in 3.12 3.13 3.14; do if python$$version -c '' 2>/dev/null; \
		then $(MAKE) test PYTHON=python$$version VENV=.venv-$$version || exit 1; else echo "skipped: no Python $$version here"; fi; done

lint: $(VENV)/.docs ## check the style, and which module imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.docs ## run mypy in strict mode
	$(BIN)/mypy

budgets: $(VENV)/.run ## say how much kernel there is and how many calls the way through it takes; fail if that grew
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.budgets

mutants: $(VENV)/.test ## plant faults, and demand that make test finds each
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

test-families: $(VENV)/.docs ## compare the transformers plugin with the plain forward of every model type; takes minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families

test-newest: .venv-newest/.installed ## test the main path on the newest release of each library
	.venv-newest/bin/python -m pytest -m "not process and not nightly" $(PARALLEL) $(NEWEST)

# The engines' tests. SELECT=1, as in CI, leaves out what is marked nightly and shows the whole kit once for each engine.
MARKS = $(if $(SELECT),-m "not nightly")
KIT = $(if $(SELECT),,CORELM_WHOLE_KIT=1)

test-vllm: .venv-vllm/.installed ## test the vLLM plugin on a real vLLM, on the CPU
	$(KIT) .venv-vllm/bin/python -m pytest $(MARKS) tests/engines/vllm tests/test_third_party_names.py

test-sglang: .venv-sglang/.installed ## test the SGLang plugin on a real SGLang server, on the CPU
	$(KIT) .venv-sglang/bin/python -m pytest $(MARKS) tests/engines/sglang tests/test_third_party_names.py

test-ray: .venv-ray/.installed ## test the Ray plugin on a Ray of this machine
	$(KIT) OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest $(MARKS) tests/engines/ray tests/test_third_party_names.py

test-harnesses: .venv-harnesses/.installed ## test the adapters for lm-eval, TRL and inspect_ai with these libraries
	OMP_NUM_THREADS=1 .venv-harnesses/bin/python -m pytest $(MARKS) tests/harnesses tests/test_third_party_names.py

test-llamacpp: .venv-llamacpp/.installed ## test the example of a plugin for llama.cpp, which is built first; takes long
	.venv-llamacpp/bin/python -m pytest tests/engines/llamacpp
	model=$$(.venv-llamacpp/bin/python -m tests.helpers.real_model gguf) && \
		oracle=$$(.venv-llamacpp/bin/python -m tests.helpers.real_model float32) && \
		.venv-llamacpp/bin/corelm conformance llamacpp --model "$$model" --option max_context=512 --option precision=1e-4 \
		--oracle-model "$$oracle" --output .venv-llamacpp/conformance

test-hosts: $(VENV)/.docs .venv-vllm/.installed .venv-sglang/.installed .venv-harnesses/.installed ## test engines in processes of their own environments
	CORELM_TEST_HOSTS=1 $(BIN)/python -m pytest tests/engines/hosted
	CORELM_TEST_HOSTS=1 OMP_NUM_THREADS=1 .venv-harnesses/bin/python -m pytest tests/harnesses/test_*_hosted.py \
		tests/harnesses/test_lm_eval.py

test-faults: $(VENV)/.docs .venv-vllm/.installed .venv-sglang/.installed .venv-ray/.installed ## kill and stop the processes of fleets under load, two minutes for each engine; clients of a server hang up
	CORELM_FAULT_SECONDS=120 $(BIN)/python -m pytest -s tests/apps/fleet/test_fleet_faults.py
	CORELM_FAULT_SECONDS=120 $(KIT) .venv-vllm/bin/python -m pytest -s tests/engines/vllm/test_fleet.py
	CORELM_FAULT_SECONDS=120 $(KIT) .venv-sglang/bin/python -m pytest -s tests/engines/sglang/test_fleet.py
	CORELM_FAULT_SECONDS=120 $(KIT) .venv-ray/bin/python -m pytest -s tests/engines/ray/test_faults.py tests/engines/ray/test_conformance.py
	CORELM_FAULT_SECONDS=60 $(BIN)/python -m pytest -s tests/apps/serve/test_load.py

test-gpu: $(VENV)/.docs ## test the transformers plugin with its models on a GPU; takes minutes, and needs a torch that has CUDA
	CORELM_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/plugins/transformers_backend $(PARALLEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families --device cuda

bench: $(VENV)/.docs ## compare the cost with that of the bare engines and of TorchRL; takes an hour or more
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

bench-quick: $(VENV)/.docs ## run fewer and smaller benchmarks, in a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks --quick

bench-real: $(VENV)/.docs ## score and generate with SmolLM2-135M-Instruct, on all cores; takes minutes
	checkpoint=$$($(BIN)/python -m tests.helpers.real_model) && $(BIN)/python -m benchmarks.real --checkpoint "$$checkpoint"

bench-gpu: $(VENV)/.docs ## measure everything that one GPU can show, in under 40 minutes; skips what is not installed
	$(BIN)/python -m benchmarks.gpu

format: $(VENV)/.docs ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the site into docs/_build; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --builder html docs docs/_build

notebooks: $(VENV)/.docs ## run the notebooks in docs/, and keep what they show
	$(BIN)/jupyter-execute --inplace --NotebookClient.record_timing=False docs/notebooks/*.ipynb

drawings: ## remake the pictures in docs/drawings from their .dot files; needs graphviz
	for drawing in docs/drawings/*.dot; do dot -Tsvg $$drawing -o $${drawing%.dot}.svg || exit 1; done

wheels: $(VENV)/.docs ## build the published packages into wheels/
	rm -rf wheels
	for package in $(PACKAGES); do $(BIN)/python -m build --no-isolation --outdir wheels $$package || exit 1; done

dist: wheels ## the same

sbom: $(VENV)/.docs ## write a bill of materials (CycloneDX) of each file of pins into sbom/
	$(BIN)/python .ci/sbom.py sbom

pins: ## write the versions in the environments into constraints/
	$(BIN)/python .ci/pins.py
	for each in vllm:vllm-cpu sglang:sglang-cpu llamacpp:llamacpp-cpu harnesses:harnesses; do \
		.venv-$${each%%:*}/bin/python .ci/pins.py --all > constraints/new && mv constraints/new constraints/$${each#*:}.txt || exit 1; done

install: $(VENV)/.docs ## set up .venv with everything that make check needs

# Each of these adds to the one before. They add and upgrade packages and remove none: after a package has left constraints/, type
# make clean.
$(VENV)/.run: constraints/run.txt $(METADATA)
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(call PINS,constraints/run.txt,$(BIN))
	$(BIN)/python -m pip install --no-compile $(TORCH)
	$(call EDITABLE,$(RUN),$(BIN))
	touch $@

$(VENV)/.test: $(VENV)/.run constraints/test.txt
	$(call PINS,constraints/test.txt,$(BIN))
	$(call EDITABLE,apps/fleet,$(BIN))
	touch $@

$(VENV)/.docs: $(VENV)/.test constraints/check.txt constraints/docs.txt
	$(call PINS,constraints/check.txt constraints/docs.txt,$(BIN))
	$(call EDITABLE,$(EXTRA),$(BIN))
	touch $@

# The newest releases, over the pins of the rest. pip looks for newer ones each time, and takes seconds if there are none. No
# release of TorchRL allows the newest tensordict, hence --no-deps.
.venv-newest/.installed: .venv-newest/.pinned
	.venv-newest/bin/python -m pip install --no-compile --upgrade $(NEWEST_TORCH) \
		transformers tensordict pluggy peft trl lm-eval inspect-ai openai
	.venv-newest/bin/python -m pip install --no-compile --upgrade --no-deps torchrl

.venv-newest/.pinned: constraints/harnesses.txt $(METADATA)
	@$(CHECK_PYTHON)
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(call PINS,constraints/harnesses.txt,.venv-newest/bin)
	$(call EDITABLE,$(RUN) $(EXTRA),.venv-newest/bin)
	touch $@

# The pins of check.txt, and those of ray.txt. No other engine is here.
.venv-ray/.installed: constraints/run.txt constraints/test.txt constraints/check.txt constraints/ray.txt $(METADATA)
	@$(CHECK_PYTHON)
	rm -rf .venv-ray
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --no-compile $(TORCH)
	cat constraints/run.txt constraints/test.txt constraints/check.txt | grep -v '^-r' > .venv-ray/pins.txt
	.venv-ray/bin/python -m pip install --no-compile --constraint .venv-ray/pins.txt --requirement constraints/ray.txt \
		hatchling hatch-fancy-pypi-readme pytest hypothesis
	.venv-ray/bin/python -m pip install --no-compile --no-build-isolation --constraint .venv-ray/pins.txt \
		$(foreach each,$(RUN) apps/fleet plugins/ray_backend apps/interop,--editable $(each)) --editable "apps/cli[serve]"
	touch $@

# lm-eval, TRL and inspect_ai ask for other versions than the others have, so harnesses.txt lists everything.
.venv-harnesses/.installed: constraints/harnesses.txt $(METADATA)
	@$(CHECK_PYTHON)
	rm -rf .venv-harnesses
	$(PYTHON) -m venv .venv-harnesses
	.venv-harnesses/bin/python -m pip install --no-compile $(TORCH)
	$(call PINS,constraints/harnesses.txt,.venv-harnesses/bin)
	$(call EDITABLE,$(RUN) $(EXTRA),.venv-harnesses/bin)
	touch $@

# The engines require GPU libraries that a CPU cannot use, so pip ignores their requirements (--no-deps), and the constraints
# list everything. prepare.py adds what the engine's own wheels lack on a CPU. llama.cpp is built here: by a C++ compiler, without
# what reads images, and with what else CMAKE_ARGS says.
.venv-llamacpp/.installed: export CMAKE_ARGS += -DLLAVA_BUILD=OFF
.venv-%/.installed: constraints/%-cpu.txt $(METADATA) $(wildcard tests/engines/*/cpu/prepare.py)
	@$(CHECK_PYTHON)
	rm -rf .venv-$*
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --no-compile $(TORCH)
	$(call PINS,constraints/$*-cpu.txt,.venv-$*/bin)
	$(call EDITABLE,$(RUN) $(EXTRA) $(wildcard examples/$*_backend),.venv-$*/bin)
	if [ -f tests/engines/$*/cpu/prepare.py ]; then .venv-$*/bin/python tests/engines/$*/cpu/prepare.py; fi
	touch $@

clean: ## remove build outputs and environments
	rm -rf .venv .venv-* wheels sbom docs/_build docs/jupyter_execute dist build reports demo-output grpo-output distill-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
