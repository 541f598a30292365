# The two commands: `make serve` and `make test`. Both set the environment up first.
PYTHON := .venv/bin/python
READY := .venv/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve rollouts test bench replay claims campaign lint format wheel-test gpu-pack clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..."        is passed on to the tool or to pytest, e.g. make serve ARGS="--port 8080"'

$(READY): pyproject.toml tools/bootstrap.sh
	@tools/bootstrap.sh

setup: $(READY)  ## make .venv with the tested packages (the other targets do it themselves)

serve: $(READY)  ## serve a small built-in GPT on the CPU: 2 replicas behind the coordinator
	@$(PYTHON) tools/serve.py --device cpu $(ARGS)

rollouts: $(READY)  ## an RL loop on the CPU: rollouts on 2 served replicas, update, again
	@$(PYTHON) tools/launch.py --processes 2 examples/rl_rollouts/rollouts.py $(ARGS)

test: $(READY)  ## run all tests
	@$(PYTHON) -m pytest $(ARGS)

campaign: $(READY)  ## load, and a fault every 10 s, for 2 minutes: nothing may be lost (ARGS="--minutes 30")
	@nice $(PYTHON) tools/campaign $(ARGS)

bench: $(READY)  ## measure the coordinator beside the released one (ARGS=--quick: under a minute)
	@$(PYTHON) tools/bench_coordinator.py $(ARGS)

replay: $(READY)  ## compare routing policies on generated rollouts, in virtual time (a minute)
	@mkdir -p build
	@$(PYTHON) -W ignore tools/replay --groups 32 --concurrency 128 --replicas 4 \
		--html build/replay.html --json build/replay.json $(ARGS)

claims: $(READY)  ## check the reported claims on generated rollouts at 16 replicas (minutes)
	@$(PYTHON) -W ignore tools/replay --seeds 0,1,2 --claims claims.json $(ARGS)

lint: $(READY)  ## lint, format check and type check
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy megatron/core/inference/coordinator tools

format: $(READY)  ## format the code and mend what ruff can
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

wheel-test: $(READY)  ## build the wheel, install it beside megatron-core, uninstall it again
	@tools/wheel_test.sh

gpu-pack: $(READY)  ## wheels for tests/gpu on a machine without network (ARGS: its Python, e.g. 3.12)
	@tests/gpu/pack.sh $(ARGS)

clean:  ## remove what set-up and builds made
	rm -rf .venv .bootstrap build dist *.egg-info
