# Every target sets itself up from a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients

TRITON := build/triton

# The many processes of a run keep their compiled modules, also where the environment says not to.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs families figures test test-full test-clients test-kubernetes lint format wheel constraints clean

demo: $(VENV)/.installed
	$(BIN)/marsray demo $(DEMO_ARGS)

test: $(VENV)/.installed-dev $(TRITON)/.installed $(VENV)/.browser lint
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

# With the coverage of lines and branches, of which build/coverage/html has the pages.
test-full: $(VENV)/.installed-dev $(TRITON)/.installed $(VENV)/.browser lint
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder --full --cov --cov-report=html --cov-report=term

# The documentation site, in build/site; a broken link or anchor is an error.
docs: $(VENV)/.installed-dev
	PYTHONPATH=docs/site $(BIN)/python -m marsray_docs.build build

# The tables of the log in the pages of docs, and the figures and diagrams in docs/figures, whose data
# docs/site/marsray_docs/figures.py names.
figures: $(VENV)/.installed-dev
	PYTHONPATH=docs/site $(BIN)/python -m marsray_docs.results
	PYTHONPATH=docs/site $(BIN)/python -m marsray_docs.figures

# The table of model families, in docs/site/data: of all, which takes minutes, or FAMILIES="NAME ...".
families: $(VENV)/.installed-dev
	PYTHONPATH=tests/support:docs/site $(BIN)/python -m decoding.family_table $(FAMILIES)

# OpenAI-compatible clients, the LM evaluation harness, aiperf and schemathesis against a server.
test-clients: $(VENV)/.installed $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini $(TEST_ARGS) tests/clients

# The manifests on the cluster that kubectl talks to; tests/kubernetes/conftest.py lists its variables.
test-kubernetes: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -c tests/kubernetes/pytest.ini $(TEST_ARGS) tests/kubernetes

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel and the source archive in dist/, byte for byte the same from the same tree, by a builder
# whose packages are checked by hash.
wheel:
	set -e; builder=$$(mktemp -d); trap 'rm -rf "$$builder"' EXIT; \
	$(PYTHON) -m venv "$$builder"; \
	"$$builder/bin/python" -m pip install --quiet --no-deps --require-hashes \
		--requirement k8s/image/constraints-build.txt; \
	"$$builder/bin/python" -m hatchling build --directory dist

# The image's packages with their hashes; see k8s/image/lock.py.
constraints: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet 'uv>=0.9'
	$(BIN)/python k8s/image/lock.py $(LOCK_ARGS)

# torch goes first and pinned, so that the project's version range is met already and pip does
# not fetch another build. Users who want a CUDA build install torch themselves beforehand.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

# Triton's interpreter, in which the kernels are tested without a GPU, is right from this version on.
# It lies apart, since CUDA builds of torch bring an older one, which they need, and others none.
$(TRITON)/.installed: $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRITON) triton==3.9.0
	touch $@

# The browser that tests of the web pages run, from Debian. Where that is not possible they are
# skipped, with the reason.
$(VENV)/.browser: $(VENV)/.torch
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null \
		&& [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		DEBIAN_FRONTEND=noninteractive timeout 180 sh -c 'apt-get -qq update && \
			apt-get -qq install --yes --no-install-recommends chromium' > /dev/null 2>&1 \
			|| echo "chromium cannot be installed; tests of the web pages will be skipped"; \
	fi
	touch $@

# The clients pin versions that the project does not share, so that they live apart, without torch.
$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build .mypy_cache .ruff_cache .pytest_cache
