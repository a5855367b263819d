# make demo · make test · make live · make check · make bench · make soak · make gpu · make docs · make clean
# Needs Linux, Python 3.11 or 3.12, make and 10 GB of disk; everything else goes into .venv, once.
# make live SGLANG=0.5.18: another supported release of SGLang, in an environment of its own, .venv-0.5.18.

PYTHON ?= python3
SGLANG ?= 0.5.17
VENV := $(if $(filter 0.5.17,$(SGLANG)),.venv,.venv-$(SGLANG))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2
BENCH_ARGS ?=
SOAK_ARGS ?=
GPU_ARGS ?=

.PHONY: demo test live check bench soak gpu docs clean

demo: $(READY)
	$(BIN)/python -m examples.april_demo $(DEMO_ARGS)

# The tests run on the CPU platform on every machine: `make gpu` has the backends and the order that a GPU needs.
# On ROCm a set HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES hides CUDA_VISIBLE_DEVICES from torch; HIP's precedes ROCR's.
test live: export CUDA_VISIBLE_DEVICES =
test live: export HIP_VISIBLE_DEVICES =

test: $(READY)
	@start=$$(date +%s); $(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(TEST_ARGS); status=$$?; \
	echo "make test took $$(( $$(date +%s) - start )) s"; exit $$status

# The live tests of the adapter, for another release of SGLang: those of trainers, other frameworks, benchmarks and pages need not
# be repeated with each.
NOT_LIVE := agent_training areal bench_rollout bridge_push demo gpu_rehearsal loop loop_ray loop_server_killed own_trainer pages \
	sglang_router slime slime_own train_interrupted verl wheel
live: $(READY)
	$(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder tests/integration \
		$(NOT_LIVE:%=--ignore=tests/integration/test_%.py) $(TEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m bench.report --readme --check

soak: $(READY)
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

# GPU_PYTHON: an interpreter that has SGLang and the packages of the extra `dev`, for ROCm, whose wheels are not on PyPI.
gpu: $(if $(GPU_PYTHON),,$(READY))
	$(or $(GPU_PYTHON),$(BIN)/python) -m bench.gpu $(GPU_ARGS)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict && echo "open out/site/index.html"

bench: $(READY)
	$(BIN)/python -m bench.rollout $(BENCH_ARGS)

# Downloads are timed apart, so that they are not taken for the demo's or the tests' own time. What a server imports is
# compiled to bytecode once here, also where PYTHONDONTWRITEBYTECODE is set: it more than halves every start.
WARM_UP := import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry

$(READY): pyproject.toml
	@[ "$$(uname)" = Linux ] || { echo "Linux is needed: SGLang has no packages for $$(uname)"; exit 1; }
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 13) or sys.exit( \
		"Python 3.11 or 3.12 is needed, not %d.%d: SGLang requires outlines_core 0.1.26, which has wheels for no newer one. " \
		"Name it: make PYTHON=python3.12" % v)'
	@set -e; echo "setting up $(VENV) (once)"; start=$$(date +%s); \
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	[ -x $(BIN)/uv ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; \
	$(BIN)/uv pip install --python $(BIN)/python --overrides tests/overrides.txt -e '.[dev]' sglang==$(SGLANG); \
	echo "downloads and installation took $$(( $$(date +%s) - start )) s"; start=$$(date +%s); \
	PYTHONDONTWRITEBYTECODE= SGLANG_APRIL_CPU=1 $(BIN)/python -W ignore -c '$(WARM_UP)' >/dev/null; \
	echo "compiling bytecode took $$(( $$(date +%s) - start )) s"; touch $@

clean:
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
