#!/usr/bin/env python3
"""An RL loop in small: rollouts on served replicas, a gradient step, new weights, and again.

tools/launch.py --processes 2 examples/rl_rollouts/rollouts.py [flags, see options.py]
"""

import os
import sys
import warnings

# Processes that this one starts run this file again: nothing heavy may be imported up here.

if __name__ == "__main__":
    # Importing megatron-core tells of a dozen packages that are of no use here.
    warnings.simplefilter("ignore")
    os.environ |= {"PYTHONWARNINGS": "ignore", "TORCH_LOGS": "-all"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it is small, and meant for the CPU
    from loop import main

    main(sys.argv[1:])
