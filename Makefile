# make demo · make test · make check · make bench · make clean
# Needs Python 3.11+ and make; everything else goes into .venv, once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: demo test check bench clean

demo: $(READY)
	$(BIN)/python -m examples.april_demo $(DEMO_ARGS)

test: $(READY)
	@start=$$(date +%s); $(BIN)/pytest $(TEST_ARGS); status=$$?; \
	echo "make test took $$(( $$(date +%s) - start )) s"; exit $$status

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m bench.rollout $(BENCH_ARGS)

# Downloads are timed apart, so that they are not taken for the demo's or the tests' own time. Bytecode is compiled
# once here: without it every server start would compile half of PyTorch's ecosystem again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 1; }
	@start=$$(date +%s); echo "setting up .venv (once)"; \
	{ [ -x $(BIN)/python ] || $(PYTHON) -m venv .venv; } && \
	{ [ -x $(BIN)/uv ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; } && \
	$(BIN)/uv pip install --python $(BIN)/python -e '.[dev]' && \
	echo "downloads and installation took $$(( $$(date +%s) - start )) s" && \
	start=$$(date +%s) && { $(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true; } && \
	echo "compiling bytecode took $$(( $$(date +%s) - start )) s" && touch $@

clean:
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
