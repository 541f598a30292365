"""Unit tests compute on the CPU, also where there is a GPU."""

import os

# Read when torch starts up, also by the processes that tests start: no GPU, one thread each.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
