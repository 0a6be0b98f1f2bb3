# `make serve` and `make test` need nothing but Python 3.11 or later on Debian or Ubuntu.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUPPLY := .venv-supply
# Flags for `baton serve`: make serve ARGS="--prefill 2 --decode 2"
ARGS ?=
# Containers set it. Every process would compile Baton's modules again, for up to two seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-faults test-fleet test-page test-clients test-together soak lint audit lock sbom bench proto setup clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' | \
		awk -F'|' '{printf "%-15s %s\n", $$1, $$2}'

serve: setup ## start a small cluster on this machine; Ctrl-C stops it
	@$(BIN)/baton serve $(ARGS)

test: setup ## run the suite
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# Prints the table of docs/RELIABILITY.md.
test-faults: setup ## signal every process at every moment of a request; cut and intrude on the network
	@$(BIN)/python -m pytest -m 'faults or not faults' tests/cluster/test_fault_matrix.py \
		tests/cluster/test_chaos.py tests/cluster/test_cut_network.py \
		tests/cluster/test_exposed_network.py tests/simulation

# Loses and adds nodes, Ray's head without and with a Redis, restarts all workers, runs two versions
# side by side; prints the table of recoveries.
test-fleet: setup ## run several clusters, routers, Ray nodes and versions at once
	@command -v redis-server >/dev/null || \
		echo "no redis-server: some tests are skipped (apt-get install redis-server)"
	@$(BIN)/python -m pytest -m fleet tests/cluster

# Draws families, weights, sizes, ranks, tiers and faults together: SEEDS=0:1000
SEEDS ?= 0:200
test-together: setup ## run many seeds of capabilities together, in whole clusters
	@BATON_TOGETHER_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/cluster/test_together.py

# Rounds of ten minutes, each with a cluster and faults by its seed: SECONDS=600 SEED=7. The report
# goes to build/soak.json.
SECONDS ?= 3600
SEED ?= 1
soak: setup ## an hour of mixed requests while processes are killed, frozen, slowed and cut off
	@PYTHONPATH=tests/support $(BIN)/python -m tests.soak.run --seconds $(SECONDS) --seed $(SEED)

# Installs playwright. Screenshots go to build/pictures.
test-page: setup ## open the page in a real browser (apt-get install chromium)
	@command -v chromium chromium-browser >/dev/null || \
		{ echo "make test-page needs a browser: apt-get install chromium"; exit 1; }
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[page]'
	@$(BIN)/python -m pytest tests/page --pictures build/pictures

# Installs Schemathesis, LangChain and Anthropic's SDK; tests/clients/programs have environments of
# their own, which are deleted at once. Prometheus is downloaded where it is not installed.
test-clients: setup ## run other people's clients: SDKs, agents, benchmarks, Triton's, buf, Prometheus, Schemathesis
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[clients]'
	@$(BIN)/python -m pytest tests/clients

lint: $(VENV)/.installed audit ## ruff, with bandit's rules, mypy --strict, and audit
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# STRICT=--strict fails where the database of vulnerabilities cannot be asked.
STRICT ?=
audit: $(SUPPLY)/.installed ## look up the images' packages among known vulnerabilities
	@$(SUPPLY)/bin/python deploy/docker/audit.py $(STRICT)

IMAGES := deploy/docker
COMPILE = $(SUPPLY)/bin/uv pip compile --quiet --upgrade --universal \
	--custom-compile-command 'make lock' pyproject.toml
COMPILE_IMAGE = $(COMPILE) --python-version 3.12 --generate-hashes --extra server
lock: $(SUPPLY)/.installed ## pin the packages of .venv and of the images again, to the latest that fit
	@$(COMPILE) --python-version 3.11 --extra test --extra lint --no-annotate \
		--config-file $(IMAGES)/cpu.uv.toml --no-emit-package torch --output-file constraints.txt >/dev/null
	@$(COMPILE_IMAGE) --no-config --output-file $(IMAGES)/cuda.lock >/dev/null
	@grep -oE '^torch==[^ ]+' $(IMAGES)/cuda.lock > $(IMAGES)/cpu-torch.txt
	@$(COMPILE_IMAGE) --config-file $(IMAGES)/cpu.uv.toml --constraints $(IMAGES)/cuda.lock \
		--no-emit-package torch --output-file $(IMAGES)/cpu.lock >/dev/null

sbom: $(SUPPLY)/.installed ## write what the images are made of, as CycloneDX, to build/sbom
	@mkdir -p build/sbom
	@$(SUPPLY)/bin/cyclonedx-py requirements $(IMAGES)/cuda.lock --pyproject pyproject.toml \
		--output-reproducible --output-file build/sbom/cuda.cdx.json
	@cat $(IMAGES)/cpu-torch.txt $(IMAGES)/cpu.lock | $(SUPPLY)/bin/cyclonedx-py requirements - \
		--pyproject pyproject.toml --output-reproducible --output-file build/sbom/cpu.cdx.json

bench: setup ## print the tables of docs/PERFORMANCE.md for this machine's CPU
	@$(BIN)/python -m bench.engine
	@$(BIN)/python -m bench.transfer
	@$(BIN)/python -m bench.index
	@$(BIN)/python -m bench.router
	@$(BIN)/python -m bench.serve

proto: $(VENV)/.installed ## regenerate baton/v1 from proto/
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
		--python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
		proto/baton/v1/*.proto

setup: $(VENV)/.installed ## install into .venv and download the embedded model
	@$(BIN)/baton model pull

# constraints.txt pins all but torch, so that a release of somebody else's changes nothing here.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes, once) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

# Apart from the server's: Ray's processes would import a second's worth of what these need.
$(SUPPLY)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip install --quiet --editable '.[supply]'
	@touch $@

clean: ## remove .venv and build files
	rm -rf $(VENV) $(SUPPLY) build dist *.egg-info
