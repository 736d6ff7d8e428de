# Two commands: `make nano` builds the environment and the nano study, to its report; `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin
# A CPU or CUDA build of torch as the machine has it; with a folder of wheels at hand, what lies there.
TORCH ?= $(if $(PIP_FIND_LINKS),,--torch-backend=auto)
# What tests need, and a TPU's compiler (200 MB) for those that are skipped without it; where there is no index, the first alone.
COMMA := ,
EXTRAS ?= $(if $(PIP_NO_INDEX)$(UV_NO_INDEX)$(UV_OFFLINE),test,test$(COMMA)ahead$(COMMA)buckets)
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1

.PHONY: nano test interpreted slow lint environment clean

nano: environment
	$(BIN)/strata check nano
	$(BIN)/dvc repro pipelines/nano/dvc.yaml
	@echo "The report: pipelines/nano/analysis/report.html"

# Tests side by side, a process a core; but slow ones, which have processes of their own, one after another.
PROCESSES ?= -n auto --maxprocesses 8

test: environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PROCESSES) --dist loadfile -m "not slow and not gpu"

# The contracts of tests/kernels for the GPU's kernels, in Triton's interpreter: a process of its own, since what is interpreted cannot be compiled.
interpreted: environment
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 STRATA_KERNELS=triton $(BIN)/python -m pytest $(PROCESSES) tests/kernels/test_bounds.py tests/kernels/test_contracts.py tests/kernels/test_halves.py tests/kernels/test_palimpsa_cuda.py tests/kernels/test_lru_input.py tests/kernels/test_rope.py tests/kernels/test_rows.py \
		tests/models/test_torch_one_token.py

slow: environment
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

environment: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q uv
	UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" $(BIN)/uv pip install -q --compile-bytecode $(TORCH) --python $(BIN)/python -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf .venv
