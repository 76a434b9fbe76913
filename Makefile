# make demo and make test need nothing but Python ≥ 3.11 and make: both go through `make install`.

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
TANGENTS := .venv-tangents
BIN := $(VENV)/bin

export TF_CPP_MIN_LOG_LEVEL ?= 3
export TF_ENABLE_ONEDNN_OPTS ?= 0

.PHONY: install demo examples test fuzz slow lint bench

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "netjac needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)."; \
	  echo "Name one that is, for example: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[tensorflow-cpu,demo,test]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps tf_keras==2.21.*  # asks for tensorflow, and has tensorflow-cpu
	@touch $@

demo: install
	$(BIN)/netjac demo --output demo-output

# Two fits with SciPy's code around the network; the pictures go to demo-output/ too.
examples: install
	mkdir -p demo-output
	cd demo-output && for name in ode constraint; do ../$(BIN)/python ../examples/$$name.py || exit 1; done

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4

# Fresh random networks against the tape, half an hour of them: NETJAC_FUZZ=200 make fuzz for fewer.
fuzz: install
	NETJAC_FUZZ=$(or $(NETJAC_FUZZ),2000) $(BIN)/python -m pytest tests/tensorflow/test_random_networks.py

# What takes minutes: whole applications, every layer in both precisions.
slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers (PyTorch, JAX, others' solvers) live in an environment of their own: their runtimes stay out of netjac's.
# neural-tangents needs an older JAX than they do, and so another.
bench: install $(PEERS)/.installed $(TANGENTS)/.installed
	$(BIN)/python -m benchmarks --peers-python $(PEERS)/bin/python --tangents-python $(TANGENTS)/bin/python
	$(BIN)/python -m benchmarks.scaling --peers-python $(PEERS)/bin/python
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.threads
	$(BIN)/python -m benchmarks.hotpaths --results benchmarks/results
	$(BIN)/python -m benchmarks.applications --results benchmarks/results
	$(BIN)/python -m benchmarks.fits --peers-python $(PEERS)/bin/python
	$(BIN)/python -m benchmarks.nist

$(PEERS)/.installed: benchmarks/peers-requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers-requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tf-levenberg-marquardt==1.0.3
	@touch $@

$(TANGENTS)/.installed: benchmarks/tangents-requirements.txt
	$(PYTHON) -m venv $(TANGENTS)
	$(TANGENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/tangents-requirements.txt
	$(TANGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tf2jax==0.3.6 neural-tangents==0.6.5
	@touch $@
