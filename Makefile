# `make serve` and `make test` need nothing but Python 3.11 or later on Debian or Ubuntu.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Flags for `baton serve`: make serve ARGS="--prefill 2 --decode 2"
ARGS ?=

.PHONY: serve test test-faults test-fleet test-page test-clients lint bench proto setup clean

serve: setup
	@$(BIN)/baton serve $(ARGS)

test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# Signals at every process at every moment of a request; prints the table of docs/RELIABILITY.md.
test-faults: setup
	@$(BIN)/python -m pytest -m 'faults or not faults' tests/cluster/test_fault_matrix.py \
		tests/cluster/test_cut_network.py

# Nodes that come and go, Ray's head without and with a Redis behind it, rolling restarts, two
# versions side by side; prints the table of recoveries.
test-fleet: setup
	@command -v redis-server >/dev/null || \
		echo "no redis-server: some tests are skipped (apt-get install redis-server)"
	@$(BIN)/python -m pytest -m fleet tests/cluster

# The page in a real browser: needs chromium (apt-get install chromium), and fetches playwright.
# Screenshots come to build/pictures.
test-page: setup
	@command -v chromium chromium-browser >/dev/null || \
		{ echo "make test-page needs a browser: apt-get install chromium"; exit 1; }
	@$(BIN)/python -m pip install --quiet --editable '.[page]'
	@$(BIN)/python -m pytest tests/page --pictures build/pictures

# Schemathesis on our own OpenAPI document, and LangChain; fetches both.
test-clients: setup
	@$(BIN)/python -m pip install --quiet --editable '.[clients]'
	@$(BIN)/python -m pytest tests/clients

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python -m bench.engine
	@$(BIN)/python -m bench.transfer
	@$(BIN)/python -m bench.index
	@$(BIN)/python -m bench.router
	@$(BIN)/python -m bench.serve

proto: $(VENV)/.installed
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
		--python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
		proto/baton/v1/*.proto

setup: $(VENV)/.installed
	@$(BIN)/baton model pull

$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV) (a few minutes, once) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) *.egg-info
