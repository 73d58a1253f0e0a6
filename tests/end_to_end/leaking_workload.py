"""A workload that prints its secrets at import, in steps and in an exception."""

import base64
import json
import os
import sys
from urllib.parse import quote

from tests.trainer.worker.my_workload import Plane

SHELL, FILE = os.environ["HF_TOKEN"], os.environ["WANDB_API_KEY"]
sys.stderr.write(f"imported with {SHELL} and {FILE}\n")


class Leaking(Plane):
    def loss(self, model, batch):
        basic = base64.b64encode(f"user:{FILE}".encode()).decode()
        sys.stdout.write(f"{SHELL} {json.dumps({'key': FILE})} https://host/?key={quote(FILE, safe='')} {basic}\n")
        sys.stdout.write(SHELL[:9])
        sys.stdout.flush()
        sys.stdout.write(f"{SHELL[9:]}\n")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            try:
                raise KeyError(FILE)
            except KeyError as error:
                raise RuntimeError(f"HTTP 401 for {SHELL}") from error
        return super().loss(model, batch)
