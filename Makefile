# `make train`, `make serve-demo` and `make test` set up .venv when it is missing or stale.

VENV := .venv
# The first Python 3.11 on PATH; TensorFlow Federated 0.87 needs 3.9 to 3.11, the lock file 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RESULTS ?= results/quickstart
PRETRAINED ?= results/pretrained
TRAIN_FLAGS ?=
DEMO ?= results/serve-demo$(if $(SECURE),-secure)

.PHONY: help train serve-demo test test-slow test-newest test-distributed mutants lint format notebooks docs bazel-test lock dist clean
help:
	@echo "make train      pretrain on public text, then train a private next-word model (results/quickstart)"
	@echo "make serve-demo train on 300 simulated devices over the network protocol (results/serve-demo)"
	@echo "                with SECURE=1, they show the server sums of groups, and no report"
	@echo "make test       run the default test suite, two files at a time (TEST_WORKERS=2), in two environments"
	@echo "make test-slow  run the tests that are left out of it for their length"
	@echo "make test-newest  run the part of it that does without TFF, on Python 3.12 or so with the newest TensorFlow"
	@echo "make test-distributed  add Ray to .venv, and run the tests that need it"
	@echo "make mutants    change lines of ROOMS, one at a time, and see whether the rooms' tests notice"
	@echo "make lint       check style with ruff, texts of arguments, and types with basedpyright"
	@echo "make format     rewrite files to the style that lint checks"
	@echo "make notebooks  execute every notebook in colabs/ on small data"
	@echo "make docs       build the site (build/site/index.html), with outputs of make notebooks if there are"
	@echo "make bazel-test run the tests with Bazel, offline"
	@echo "make lock       regenerate requirements.lock, and those of Ray, docs and test-newest (needs uv)"
	@echo "make dist       build sdist and wheel, and run the wheel in fresh environments of each kind"
	@echo "make clean      remove .venv, .venv-newest and caches"

$(READY): requirements.lock setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "Python 3.11 is needed (TensorFlow Federated 0.87 allows no newer one): install it, e.g. 'apt-get install python3.11-venv' or 'pyenv install 3.11', or name one with 'make PYTHON=/path/to/python3.11 ...'." >&2; exit 2; }
	@echo "Setting up $(VENV), once ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "Downloading and installing $$(grep -c '^[a-z0-9].*==' requirements.lock) packages: about two minutes, without output ..."
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@echo "$(VENV) is ready."
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

# The rooms that do without TFF, with the newest of everything. The lock is for Python 3.12; with others, the
# newest versions that they can have.
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(shell $(PYTHON) .ci/find_python.py 12 13 11 10)
NEWEST_ROOMS ?= accounting auditing cli data discretization finetuning learning mechanisms models \
  participation private_round runs runtime secure_sums sweeps training

$(NEWEST)/.ready: requirements/newest.lock requirements/newest.in
	@[ -n "$(NEWEST_PYTHON)" ] || { \
	  echo "Python 3.12 is needed (or 3.13, 3.11, 3.10): install it, e.g. 'pyenv install 3.12', or name one with 'make NEWEST_PYTHON=/path/to/python3.12 ...'." >&2; exit 2; }
	@echo "Setting up $(NEWEST), once: about two minutes, without output ..."
	@$(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	@if $(NEWEST)/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then \
	  $(NEWEST)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/newest.lock; \
	else \
	  echo "Not Python 3.12, for which requirements/newest.lock is: taking the newest versions."; \
	  $(NEWEST)/bin/python -m pip install --quiet -r requirements/newest.in; \
	fi
	@touch $@

# Some of their tests need TFF or another package of its environment: what is skipped is written down.
SKIPPED := build/skipped_tests.txt

test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/$(PYTEST) --goal 700 --left-out $(SKIPPED) $(addprefix tests/,$(NEWEST_ROOMS))

# Each test once: what the newest versions cannot run, TFF's environment does.
test: test-newest $(READY)
	$(BIN)/$(PYTEST) --goal 500 @$(SKIPPED) $(wildcard tests/*_test.py) \
	  $(filter-out $(addprefix tests/,$(NEWEST_ROOMS)),$(patsubst %/,%,$(wildcard tests/*/)))

# All of them in TFF's environment.
test-slow: $(READY)
	$(BIN)/$(PYTEST) -m slow -o faulthandler_timeout=0

test-distributed: $(READY)
	@echo "Installing Ray into $(VENV): about half a minute, without output ..."
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/distributed.lock
	$(BIN)/python -m pytest -m "slow or not slow" tests/execution/ray_clients_test.py \
	  tests/runtime/cluster tests/cli/serve_test.py

ROOMS ?= participation discretization accounting mechanisms numpy_noise private_round secure_sums runs execution
MUTANTS ?= 20
mutants: $(READY)
	$(BIN)/python -m verification.mutants $(ROOMS) --sample $(MUTANTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m verification.plain_words tff_dpftrl verification
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: $(READY)
	$(BIN)/python colabs/execute.py --output build/notebooks

$(VENV)/.docs-ready: $(READY) requirements/docs.lock
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/docs.lock
	@touch $@

# Everything anew, so that no page is left of what is gone; nothing is fetched while it builds.
docs: $(VENV)/.docs-ready
	rm -rf build/site build/site-doctrees
	$(BIN)/python docs/stage.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/site-doctrees \
	  build/site-pages build/site

bazel-test: $(READY)
	. $(BIN)/activate && bazel test //tests/...

lock:
	uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header \
	  --override requirements/overrides.txt requirements/requirements.in --output-file requirements.lock
	uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header \
	  --constraint requirements.lock requirements/distributed.in \
	  --output-file requirements/distributed.lock
	uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header \
	  --constraint requirements.lock requirements/docs.in --output-file requirements/docs.lock
	uv pip compile --quiet --python-version 3.12 --generate-hashes --no-header --upgrade \
	  requirements/newest.in --output-file requirements/newest.lock

# Any Python from 3.10 builds; DIST_FLAGS='--only "maths only"' runs one of the environments.
dist:
	$(PYTHON) .ci/dist.py $(DIST_FLAGS)

clean:
	rm -rf $(VENV) $(NEWEST) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
