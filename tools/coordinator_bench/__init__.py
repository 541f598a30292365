"""The parts of tools/bench_coordinator.py: drivers of both coordinators, and what is measured."""
