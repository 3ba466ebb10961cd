# A fresh machine needs `make run` and `make test`; both set up what they need first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test tests lint check cards bench look clean

run: .venv/ready
	$(BIN)/basecap run quickstart --out runs/quickstart --per-device 2

# Types are checked while tests wait for other processes.
test:
	$(MAKE) --jobs=2 lint tests

tests: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy basecap

check: lint .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_house_rules.py

cards: .venv/ready
	$(BIN)/python -m tests.ops.kernels_on_cards results/kernels/cards.json

bench: .venv/ready
	$(BIN)/basecap bench ops

look: .venv/ready
	$(BIN)/python -m tests.look

clean:
	rm -rf .venv runs

# What pip would do on one core; here on all of them, beside the linters, and not for the packages' own tests or
# what few programs import. Files for later versions of Python do not compile, and nothing imports them.
RARE := /(tests|lm_eval/tasks|pygments/lexers|ray/(data|llm|rllib|serve|tune)|torch/testing/_internal|transformers/models)/
UNUSED := site-packages/(awkward|mypy|mypyc|narwhals|nltk|pip|setuptools|sklearn)/
.venv/ready: .venv/installed
	$(BIN)/python -m compileall -qq --workers 0 -x '$(RARE)|$(UNUSED)' .venv/lib basecap || true
	touch .venv/ready

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed
