# Each target is one line; .ci/run calls the same ones. PYTHON chooses the interpreter that .venv is made from.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE := # tests and zeroshard are compiled once, not in each process that a test starts

.PHONY: install demo test tools full pairs drawn slow check docs bench gpu oldest newest trainers ray referee web release

install: .venv/installed

.venv/package: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv && $(BIN)/pip install -q 'pip>=25.1' && $(BIN)/pip install -c constraints.txt -e '.[torch]' && touch $@

.venv/installed: .venv/package ## what the tests and tools need beside the package
	$(BIN)/pip install -q -c constraints.txt --group dev -e . && touch $@

demo: .venv/package ## train at stage 3, at stage 0, and resumed on other ranks, and compare every bit
	$(BIN)/zeroshard demo

test: install ## every claim of the engine at least once; tests/selection.py says how
	$(BIN)/pytest -m "not full and not slow" -n 3 --dist loadfile --worlds --ignore=tests/tools --seconds=run/ci/test.json

tools: install ## the same of commands, planner, page, texts, trainers and the formats of others
	$(BIN)/pytest -m "not full and not slow" -n 3 --dist loadfile --seconds=run/ci/tools.json tests/tools

full: install ## the rest: every value of a test's parameters, tests of over a second, and one test of each function on ranks in processes
	$(BIN)/pytest -m "(full or once) and not (pairs or slow)" -n 3 --dist loadfile --worlds --once --seconds=run/ci/full.json

drawn: install ## nightly, an hour: ranks as threads under schedules and faults drawn from fresh seeds; tests/world/README.md. SEEDS=n
	cd tests && seed=$$(date +%s) && ../$(BIN)/python -m world drawn --seeds $(or $(SEEDS),2000) --first $$seed && \
	../$(BIN)/pytest -q -m "not slow" --worlds=$$seed test_bits.py test_gradients.py test_checkpoint.py test_split.py

pairs: install ## an hour: any two values of a test's parameters that full has not in one test
	$(BIN)/pytest -m "pairs and not slow" -n 3 --dist loadfile --worlds

slow: install ## an hour or more: what is marked slow, and all combinations of a test's parameters that pairs leaves out
	$(BIN)/pytest -m slow -n 3 --dist loadfile

check: install ## format, lint, types, layers, public names
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/pytest -q tests/test_house.py

docs: install ## the walkthrough, pictures and lists in docs/, the snippets and links of all pages, and the site in site/
	ZEROSHARD_DOCS=./ $(BIN)/zeroshard explain --out docs/zero.html && $(BIN)/python docs/tree.py && $(BIN)/python docs/commands.py && $(BIN)/python docs/trust.py && $(BIN)/python docs/pictures.py && $(BIN)/python docs/exchange.py
	$(BIN)/pytest -q tests/tools/test_docs.py && $(BIN)/python docs/site.py

bench: install ## zeroshard beside its peers: training steps, checkpoints; an hour. BENCH=--quick: less of two of these, two minutes
	$(BIN)/python -m bench $(BENCH)

gpu: install ## the first hour on GPUs, step by step, into gpu-results/; STEP=n: one; RANKS=n share them; DEVICE=emu: rehearses
	$(BIN)/python -m bench.gpu $(if $(DEVICE),--device $(DEVICE)) $(if $(STEP),--step $(STEP)) $(if $(RANKS),--ranks $(RANKS))

oldest newest: %: .venv-%/installed ## make test on the oldest and the newest torch of the range, in an environment of its own: 5 GB of CUDA
	CUDA_VISIBLE_DEVICES= .venv-$*/bin/pytest -m "not full and not slow" -n 3 --dist loadfile --worlds --ignore=tests/tools

.venv-oldest/installed: TORCH := torch==2.11.0
.venv-newest/installed: TORCH := torch<2.16
.venv-oldest/installed .venv-newest/installed: .venv-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-$* && grep -v '^torch==\|^nvidia' constraints.txt >.venv-$*/constraints.txt
	.venv-$*/bin/pip install -q 'pip>=25.1' && .venv-$*/bin/pip install -q -c .venv-$*/constraints.txt '$(TORCH)' --group dev -e . && touch $@

trainers: .venv-trainers/installed ## Accelerate, Hugging Face's Trainer, Lightning and Ray, from a virtual environment of their own; five minutes
	.venv-trainers/bin/pytest -m "trainers and not slow" -n 2 --dist loadfile tests/test_optimizer.py tests/tools --ignore=tests/tools/test_page.py

ray: .venv-trainers/installed ## Ray Train on a local cluster of three nodes, and torchao's states of 8 bits, from the same environment
	.venv-trainers/bin/pytest tests/tools/test_ray.py tests/test_optimizer.py -k "test_ray or torchao"

.venv-trainers/installed: pyproject.toml constraints-trainers.txt
	$(PYTHON) -m venv --clear .venv-trainers && .venv-trainers/bin/pip install -q 'pip>=25.1'
	.venv-trainers/bin/pip install -q -c constraints-trainers.txt --group trainers -e . && touch $@

referee: .venv-referee/installed ## docs/referee.md: bugs of other engines, each shown by its job on CPUs, from an environment of its own; ten minutes
	.venv-referee/bin/pytest -m referee tests/tools/test_referee.py

.venv-referee/installed: pyproject.toml examples/referee/requirements.txt examples/referee/engines.txt
	$(PYTHON) -m venv --clear .venv-referee && .venv-referee/bin/pip install -q 'pip>=25.1'
	.venv-referee/bin/pip install -q -r examples/referee/requirements.txt -e '.[torch]'
	while read -r engine needs; do DS_ACCELERATOR=cpu .venv-referee/bin/pip install -q --no-deps --no-build-isolation --target ".venv-referee/engines/$$engine" $$engine $$needs || exit 1; done <examples/referee/engines.txt && touch $@

web: ## the page's template and the list of what is in it, from web/ into the package; needs Node 20.19 or later
	cd web && npm ci --no-audit --no-fund && npm run check && npm test && npm run build && cp dist/index.html ../src/zeroshard/explain/page.html && cp dist/page.cdx.json ../src/zeroshard/explain/

release: install ## sdist and wheel in dist/, checked, and the wheel's commands run in an environment of its own; uploads nothing. DRY=1: without addresses
	@$(if $(DRY),true,! grep -n '\.invalid"$$' pyproject.toml || { echo "pyproject.toml: write the project's addresses into [project.urls]"; exit 1; })
	$(BIN)/pip install -q -c constraints.txt --group release && rm -rf dist && $(BIN)/hatchling build -d dist && $(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv --clear dist/.venv && dist/.venv/bin/pip install -q dist/*.whl && dist/.venv/bin/zeroshard plan --params 70B --ranks 64 --gpu h100-80
