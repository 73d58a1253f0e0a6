"""Imported by every Python program that has this folder in PYTHONPATH: lets controllers of tests start warm jobs."""

import os
import sys

if "WARM_JOBS" in os.environ and "orchestrator.controller.service" in sys.orig_argv:
    from tests.warm_jobs import start_jobs_warm

    start_jobs_warm()
