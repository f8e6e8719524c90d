# The commands of this repository. Each installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup slurm newer-slurm older-vllm demo vision-demo slurm-demo test long soak quick check lint type layers bench docs
setup:
	@$(PYTHON) tools/setup_env.py

slurm:
	@$(PYTHON) tools/install_slurm.py

# A newer Slurm in .venv, for tests/slurm/test_newer.py; the system is not changed.
newer-slurm: setup
	@$(BIN)/python tools/other_slurm.py

# Tests of the engine with the oldest vLLM that pyproject.toml allows, in an environment of its own. This vLLM leaves
# sockets open when an engine of two processes is closed; Python's warning of that is no error here.
older-vllm: setup
	@$(BIN)/python tools/older_vllm.py
	@.venv-older-vllm/bin/python -m pytest -n 2 --dist loadscope -W ignore::pytest.PytestUnraisableExceptionWarning \
	  tests/contract/test_engine.py tests/contract/test_engine_batches.py tests/contract/test_vllm_versions.py \
	  tests/integration/test_vllm_repairs.py tests/integration/test_vllm_parallel.py tests/integration/test_engine_ranks.py \
	  tests/integration/test_engine_worker.py tests/integration/test_sync_probe.py

demo: setup
	@$(BIN)/python tools/demo.py

# The same with pictures: a policy and a GenRM that see.
vision-demo: setup
	@$(BIN)/python tools/vision_demo.py

slurm-demo: setup slurm
	@$(BIN)/python tools/slurm_demo.py

# Every test. With UNTIL (seconds since 1970) long tests are left out, by lots, that would not end by then.
test: quick long

# Three workers on two cores, because some tests only wait (for Slurm, for a lease to expire): tests/dealing.py deals them
# so that some wait while others compute.
long: setup slurm newer-slurm
	@$(BIN)/python -m pytest -n 3 --dist loadscope --part long --durations 60 --durations-min 8 \
	  $(if $(UNTIL),--until=$(UNTIL)) $(if $(MEASURE),--measure=$(MEASURE)) tests

# Generate docs/configuration.md and the schemas for editors from the config classes.
docs: setup
	@$(BIN)/python -m yatt.config.document

# Run the long checks in full (some draw a sample otherwise), a storm of faults, and the tests that kill processes, ROUNDS times.
ROUNDS ?= 5
soak: setup slurm newer-slurm
	@$(MAKE) long
	@YATT_RESUME_MATRIX=all YATT_DAMAGES=all YATT_CRASH_POINTS=all YATT_FUZZ=5000 YATT_FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest \
	  tests/integration/trainer/test_resume_matrix.py tests/integration/test_damaged_runs.py \
	  tests/integration/test_open_ports.py tests/faults/test_crash_points.py \
	  tests/faults/test_crash_points_s3.py tests/property tests/protocol
	@for nurseries in 1 0; do YATT_STARTED=1 YATT_NURSERIES=$$nurseries YATT_KILLS=14 $(BIN)/python -m pytest \
	  tests/faults/test_kills_in_placements.py tests/faults/test_resume_real.py tests/faults/test_resume_exact.py \
	  || exit 1; done
	@YATT_SOAK_ITERATIONS=900 YATT_SOAK_STORMS=2 YATT_LEARNING=1 YATT_SLAB_ITERATIONS=10000 $(BIN)/python -m pytest tests/soak
	@YATT_FORMS=all $(BIN)/python -m pytest tests/slurm/test_forms.py
	@YATT_STORM_SCHEDULES=10 YATT_STORM_EVENTS=12 $(BIN)/python -m pytest -s tests/slurm/test_storm.py
	@for round in $$(seq $(ROUNDS)); do YATT_STARTED=1 $(BIN)/python -m pytest -n 2 --dist loadscope \
	  tests/faults tests/slurm tests/integration || exit 1; done

# Five minutes on two cores. The limit is in CPU seconds of a quiet machine (tests/speed.py): 6,500 tests cost 510 there.
# Processors differ in more than that measure sees (one without bfloat16 and AVX-512: 646), so it is a third above
# them; what bounds growth are the recorded seconds (tests/durations.py).
quick: setup
	@YATT_MOST_CPU_S=850 $(BIN)/python -m pytest -n 2 --dist loadscope --part quick \
	  tests/unit tests/protocol tests/property tests/scenarios

check: lint type layers test

lint: setup
	@$(BIN)/ruff format --check yatt tests tools
	@$(BIN)/ruff check yatt tests tools

type: setup
	@$(BIN)/mypy

layers: setup
	@$(BIN)/lint-imports

bench: setup
	@$(BIN)/python -m tests.bench.run
