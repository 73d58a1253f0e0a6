"""A workload that cannot be imported ends its fork server with the reason, however it does so."""

import sys

import pytest
import torch

from trainer.agent.fork_server.server import _import_workload
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.messages.ranks import FROM_FORK_SERVER, ImportFailed, packet_pair, receive_packet


@pytest.mark.parametrize(
    ("source", "exception", "message"),
    [
        ("import sys\nsys.exit(0)\n", "SystemExit", "it called sys.exit(0)"),
        ("raise SystemExit\n", "SystemExit", "it called sys.exit(None)"),
        ("raise ValueError('bad data')\n", "ValueError", "bad data"),
        ("from torch.optim import NoSuchThing\n", "WorkloadError", f"; the installed torch {torch.__version__} lacks"),
        ("import nothing_of_that_name\n", "WorkloadError", "No module named 'nothing_of_that_name'"),
    ],
)
def test_what_the_import_raises_is_told_to_the_agent(tmp_path, monkeypatch, source, exception, message):
    (tmp_path / "mine_that_ends.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = JobConfig(workload=WorkloadConfig(target="mine_that_ends:Mine", path=(str(tmp_path),)))
    ours, theirs = packet_pair()
    with ours, theirs:
        with pytest.raises(SystemExit) as ended:
            _import_workload(config, theirs)
        assert ended.value.code == 1
        ours.settimeout(60)
        packet, _ = receive_packet(ours, FROM_FORK_SERVER)
    assert isinstance(packet, ImportFailed)
    assert packet.exception == exception
    assert message in packet.message
    assert "mine_that_ends.py" in packet.traceback
    sys.modules.pop("mine_that_ends", None)
