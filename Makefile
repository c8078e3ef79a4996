# make demo    the main job: a trained model to INT4, with figures
# make test    lint, types, tests and tutorials; what CI runs
# make test-all, make bench    slower checks; measurements against named peers
# make gpu-bundle    build/gpu-bundle: kernels to check and time on a machine with a GPU, without TVM
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
FIGURES := build/figures
PARALLEL := -n logical --maxprocesses 4 --dist loadfile
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-all bench gpu-bundle lint clean

demo: export PYTHONPATH := .
demo: $(INSTALLED)
	$(BIN)/python tests/benchmarks/main_job.py

test: $(INSTALLED) lint
	$(PYTEST) $(PARALLEL) --nbmake tests tutorials

test-all: $(INSTALLED) lint
	$(PYTEST) $(PARALLEL) -m "not gpu" --nbmake tests tutorials
	$(BIN)/python -m pip install --quiet --target build/numpy-2.4 "numpy==2.4.*"
	PYTHONPATH=build/numpy-2.4 $(PYTEST) tests/sits_tvm/test_trainer.py

# The packages, not the folders of tests/ that have their names.
bench: export PYTHONPATH := .
bench: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_kernels.py --json $(FIGURES)/kernels.json
	$(BIN)/python tests/benchmarks/bench_int4.py --json $(FIGURES)/int4.json --plot $(FIGURES)/int4.png
	$(BIN)/python tests/benchmarks/bench_int4_variants.py --json $(FIGURES)/int4_variants.json
	$(BIN)/python tests/benchmarks/bench_int4_model.py --json $(FIGURES)/int4_model.json
	$(BIN)/python tests/benchmarks/bench_attention.py --json $(FIGURES)/attention.json
	$(BIN)/python tests/benchmarks/bench_attention_models.py --json $(FIGURES)/attention_models.json
	$(BIN)/python tests/benchmarks/bench_fake_quantize.py --json $(FIGURES)/fake_quantize.json
	$(BIN)/python tests/benchmarks/bench_qat.py --json $(FIGURES)/qat.json
	$(BIN)/python tests/benchmarks/bench_compile.py --json $(FIGURES)/compile.json
	$(BIN)/python tests/benchmarks/bench_gradient_fidelity.py --json $(FIGURES)/gradient_fidelity.json
	$(BIN)/python tests/benchmarks/main_job.py --tokens 6000 --json $(FIGURES)/main_job.json
	$(BIN)/python tests/benchmarks/figures.py $(FIGURES)

gpu-bundle: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python tests/benchmarks/gpu_bundle/write.py build/gpu-bundle
	$(BIN)/python build/gpu-bundle/run.py --dry

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[hf,onnx,cuda,tune,test,tutorials]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
