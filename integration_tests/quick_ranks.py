"""Quick starts of jobs in ranks that are forked from the server of `run_ranks`, which imports this module."""

import os

from quick_jobs import start_quickly

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # see `quick_jobs`
start_quickly()
