# `make train` and `make serve-demo` set up .venv when it is missing or stale, from any Python 3.10 to
# 3.13 and without TensorFlow Federated (TFF). `make test` adds what tests need, and sets up .venv-tff
# for the tests of TFF's parts, where Python 3.11 is there: TFF 0.87 has no newer one.

VENV := .venv
PYTHON ?= $(shell python3 .ci/find_python.py 12 13 11 10)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.dev-ready
TFF := .venv-tff
TFF_PYTHON ?= $(shell python3 .ci/find_python.py 11)
RESULTS ?= results/quickstart
PRETRAINED ?= results/pretrained
TRAIN_FLAGS ?=
DEMO ?= results/serve-demo$(if $(SECURE),-secure)

.PHONY: help train serve-demo tff-demo test test-tff test-slow test-distributed mutants lint types format notebooks notebooks-tff docs bazel-test lock dist clean
help:
	@echo "make train      pretrain on public text, then train a private next-word model (results/quickstart)"
	@echo "make serve-demo train on 300 simulated devices over the network protocol (results/serve-demo)"
	@echo "                with SECURE=1, they show the server sums of groups, and no report"
	@echo "make tff-demo   TFF's federated averaging with our aggregator, beside its own Gaussian (Python 3.11)"
	@echo "make test       run the default test suite, two files at a time (TEST_WORKERS=2); with Python 3.11, TFF's, too"
	@echo "make test-slow  run the tests that are left out of it for their length"
	@echo "make test-distributed  add Ray to .venv, and run the tests that need it"
	@echo "make mutants    change lines of ROOMS, one at a time, and see whether the rooms' tests notice"
	@echo "make lint       check style with ruff, texts of arguments, and types with basedpyright"
	@echo "make format     rewrite files to the style that lint checks"
	@echo "make notebooks  execute every notebook in colabs/ on small data"
	@echo "make docs       build the site (build/site/index.html), with outputs of make notebooks if there are"
	@echo "make bazel-test run the tests with Bazel, offline"
	@echo "make lock       regenerate requirements.lock and requirements/*.lock (needs uv)"
	@echo "make dist       build sdist and wheel, and run the wheel in fresh environments of each kind"
	@echo "make clean      remove .venv, .venv-tff and caches"

# Installs hashed locks ($(2)) into an environment ($(1)). uv needs a fifth of pip's time; where only pip
# knows an index, pip does it. Both compile the modules, since importing TensorFlow takes 12 s more otherwise.
define install
	@$(1)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/installer.lock
	@$(1)/bin/uv pip install --quiet --no-deps --require-hashes --compile-bytecode --python $(1)/bin/python \
	  $(addprefix -r ,$(2)) || \
	  $(1)/bin/python -m pip install --quiet --no-deps --require-hashes $(addprefix -r ,$(2))
endef

# Caches the text that many tests train on, which takes half a minute in a new environment and no test should.
read_docs = $(1)/python -c "from tff_dpftrl.data import docstrings; docstrings.read()"

$(READY): requirements.lock setup.py
	@[ -n "$(PYTHON)" ] || { \
	  echo "Python 3.10, 3.11, 3.12 or 3.13 is needed: install one, e.g. 'apt-get install python3-venv', or name one with 'make PYTHON=/path/to/python ...'." >&2; exit 2; }
	@echo "Setting up $(VENV) with $(PYTHON), once: $$(grep -c '^[a-z0-9].*==' requirements.lock) packages ..."
	@$(PYTHON) -m venv --clear $(VENV)
	$(call install,$(VENV),requirements.lock)
	@$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python -e .
	@echo "$(VENV) is ready."
	@touch $@

$(DEV_READY): $(READY) requirements/dev.lock
	@echo "Adding what tests need to $(VENV) ..."
	$(call install,$(VENV),requirements/dev.lock)
	-@$(call read_docs,$(BIN))
	@touch $@

$(TFF)/.ready: requirements/tff.lock setup.py
	@[ -n "$(TFF_PYTHON)" ] || { \
	  echo "Python 3.11 is needed (TensorFlow Federated 0.87 allows no newer one): install it, e.g. 'pyenv install 3.11', or name one with 'make TFF_PYTHON=/path/to/python3.11 ...'." >&2; exit 2; }
	@echo "Setting up $(TFF) with $(TFF_PYTHON), once ..."
	@$(TFF_PYTHON) -m venv --clear $(TFF)
	$(call install,$(TFF),requirements/tff.lock)
	@$(TFF)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	-@$(call read_docs,$(TFF)/bin)
	@touch $@

train: $(READY)
	@if [ -e $(RESULTS)/config.json ]; then \
	  echo "$(RESULTS) holds a run: going on with it. For another one: make train RESULTS=results/other"; \
	  $(BIN)/tff-dpftrl train --resume --output $(RESULTS); \
	else \
	  { [ -e $(PRETRAINED)/model.npz ] || \
	    $(BIN)/tff-dpftrl pretrain --config quickstart --output $(PRETRAINED); } && \
	  $(BIN)/tff-dpftrl train --config quickstart --initial-weights $(PRETRAINED) \
	    --output $(RESULTS) $(TRAIN_FLAGS); \
	fi

serve-demo: $(READY)
	experiments/serve_demo.sh $(BIN)/tff-dpftrl $(PRETRAINED) $(DEMO) $(if $(SECURE),secure)

# Each worker takes up to 3 GB of memory; a file's tests share theirs. Workers share the cores: with
# threads of their own, NumPy's sums would wait for each other.
TEST_WORKERS ?= 2
export OPENBLAS_NUM_THREADS = 1
PYTEST := python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --durations 10

# What is skipped for a package that .venv lacks is written down, and run in TFF's environment: each
# test once. Both run, whatever becomes of the first.
SKIPPED := build/skipped_tests.txt
define in_both
	$(BIN)/$(PYTEST) $(1) --left-out $(SKIPPED); status=$$?; \
	if [ -n "$(TFF_PYTHON)" ]; then $(MAKE) test-tff TFF_FLAGS="$(2)" || status=$$?; \
	else echo "There is no Python 3.11: the tests of what needs TensorFlow Federated are left out."; fi; \
	exit $$status
endef

test: $(DEV_READY)
	@$(call in_both,--goal 900,--goal 300)

test-tff: $(TFF)/.ready
	$(TFF)/bin/$(PYTEST) $(TFF_FLAGS) @$(SKIPPED)

test-slow: $(DEV_READY)
	@$(call in_both,-m slow -o faulthandler_timeout=0,-m slow -o faulthandler_timeout=0)

tff-demo: $(TFF)/.ready
	$(TFF)/bin/python experiments/tff_demo.py

test-distributed: $(DEV_READY)
	@echo "Installing Ray into $(VENV): about half a minute, without output ..."
	$(call install,$(VENV),requirements/distributed.lock)
	$(BIN)/python -m pytest -m "slow or not slow" tests/execution/ray_clients_test.py \
	  tests/runtime/cluster tests/cli/serve_test.py

ROOMS ?= participation discretization accounting mechanisms numpy_noise private_round secure_sums runs execution
MUTANTS ?= 20
mutants: $(TFF)/.ready
	$(TFF)/bin/python -m verification.mutants $(ROOMS) --sample $(MUTANTS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m verification.plain_words tff_dpftrl verification
	$(if $(TFF_PYTHON),$(MAKE) types)

# Types of the aggregators are TFF's.
types: $(DEV_READY) $(TFF)/.ready
	$(BIN)/basedpyright --pythonpath $(TFF)/bin/python

format: $(DEV_READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: $(DEV_READY)
	$(BIN)/python colabs/execute.py --output build/notebooks
	$(if $(TFF_PYTHON),$(MAKE) notebooks-tff)

notebooks-tff: $(TFF)/.ready
	$(TFF)/bin/python colabs/execute.py --output build/notebooks --needing tensorflow_federated

$(TFF)/.docs-ready: $(TFF)/.ready requirements/docs.lock
	$(call install,$(TFF),requirements/docs.lock)
	@touch $@

# Everything anew, so that no page is left of what is gone; nothing is fetched while it builds.
docs: $(TFF)/.docs-ready
	rm -rf build/site build/site-doctrees
	$(TFF)/bin/python docs/stage.py
	$(TFF)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/site-doctrees \
	  build/site-pages build/site

bazel-test: $(TFF)/.ready
	. $(TFF)/bin/activate && bazel test //tests/...

COMPILE := uv pip compile --quiet --generate-hashes --no-header
lock:
	$(COMPILE) --universal --python-version 3.10 --upgrade requirements/requirements.in \
	  --output-file requirements.lock
	for name in dev distributed; do \
	  $(COMPILE) --universal --python-version 3.10 --constraint requirements.lock \
	    requirements/$$name.in --output-file requirements/$$name.lock; done
	$(COMPILE) --universal requirements/installer.in --output-file requirements/installer.lock
	$(COMPILE) --python-version 3.11 --override requirements/tff_overrides.txt requirements/tff.in \
	  --output-file requirements/tff.lock
	$(COMPILE) --python-version 3.11 --constraint requirements/tff.lock requirements/docs.in \
	  --output-file requirements/docs.lock

# Any Python from 3.10 builds; DIST_FLAGS='--only "maths only"' runs one of the environments.
dist:
	$(PYTHON) .ci/dist.py $(DIST_FLAGS)

clean:
	rm -rf $(VENV) $(TFF) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
