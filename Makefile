# make tune    set up and tune attention, softmax and gemm with what works here (under 5 minutes after the installation)
# make test    set up and run the tests and the import rules (under 12 minutes on 2 cores)
# make lint    format, lint and types
# make clean   remove .venv and what the tests leave

.PHONY: tune test lint format clean
SETUP := pyproject.toml scripts/setup.sh scripts/has_gpu.sh
BIN := .venv/bin

tune: .venv/.tune
	@sh scripts/first_tune.sh

test: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile
	$(BIN)/lint-imports

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.tune: $(SETUP)
	@sh scripts/setup.sh tune
	@touch $@

.venv/.test: $(SETUP)
	@sh scripts/setup.sh test
	@touch $@ .venv/.tune

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
