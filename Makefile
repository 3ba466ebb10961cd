# A fresh machine needs `make run` and `make test`; both set up what they need first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint check bench look clean

run: .venv/ready
	$(BIN)/basecap run quickstart --out runs/quickstart --per-device 2

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy basecap

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_house_rules.py

bench: .venv/ready
	$(BIN)/basecap bench ops

look: .venv/ready
	$(BIN)/python -m tests.look

clean:
	rm -rf .venv runs

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/ready
