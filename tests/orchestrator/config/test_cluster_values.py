"""Values that Slurm could not read are refused with the configuration, each with a remedy."""

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError
from orchestrator.scheduler.slurm.sbatch_values import FLAGS, FORMS, KNOWN, LONGEST_LEAD

ENVIRON = {"HOME": "/nowhere"}

REFUSED = [
    ("cluster.mem=lots", "Slurm cannot read this", "cluster.mem takes a whole number with K, M, G or T: 64G"),
    ("cluster.mem=8GiB", "Slurm cannot read this", "cluster.mem takes"),
    ("cluster.mem=1.5G", "Slurm cannot read this", "cluster.mem takes"),
    ("cluster.mem=-1", "Slurm cannot read this", "cluster.mem takes"),
    ("cluster.mem=٣G", "Slurm cannot read this", "cluster.mem takes"),
    ("cluster.mem=8", "Slurm reads this as 8 MB", "cluster.mem=8G, or cluster.mem=8M"),
    ("+cluster.sbatch.mem-per-cpu=4", "reads this as 4 MB", "cluster.sbatch.mem-per-cpu=4G, or"),
    ("cluster.time=3600", "reads this as 3600 minutes", "write D-HH:MM:SS or H:MM:SS"),
    ("+restore_tests.cluster.time=7200", "7200 minutes", "restore_tests.cluster.time=2-00:00:00"),
    ("cluster.time=1h", "as a time limit", "cluster.time takes minutes, H:MM:SS or D-HH:MM:SS"),
    ("cluster.time=soon", "as a time limit", "cluster.time takes minutes, H:MM:SS or D-HH:MM:SS"),
    ("cluster.time=", "as a time limit", "cluster.time takes minutes"),
    ("cluster.time=-5", "as a time limit", "cluster.time takes minutes"),
    ("cluster.time=0", "must be greater than zero", "cluster.time takes minutes"),
    ("cluster.time=UNLIMITED", "as a time limit", "cluster.time takes minutes"),
    ("cluster.partition=a b", "Slurm cannot read this", "a partition name, or several with commas"),
    ("cluster.partition=débogage", "Slurm cannot read this", "a partition name"),
    ("cluster.partition=-p", "Slurm cannot read this", "a partition name"),
    ("cluster.qos=high,low", "Slurm cannot read this", "cluster.qos takes a QOS name"),
    ("cluster.account=$(rm -rf /)", "Slurm cannot read this", "cluster.account takes an account name"),
    ("cluster.constraint=a b", "Slurm cannot read this", "node features: h100&ib"),
    ("cluster.exclude=gpu[1-", "not a host list", "cluster.exclude takes gpu[003,017]"),
    ("cluster.partition=a\nb", "newlines and control characters are refused", "on one line"),
    ("cluster.interface=ib0\x00", "newlines and control characters are refused", "on one line"),
    ("cluster.python=-c", "must not begin with '-'", "read it as another option"),
    ("cluster.signal_lead=-5", "must be from 0 to 65535 seconds", "cluster.signal_lead=120"),
    (f"cluster.signal_lead={LONGEST_LEAD + 1}", "must be from 0 to 65535 seconds", "cluster.signal_lead=120"),
    ("+cluster.sbatch.nodelist=gpu[1-", "not a host list", "cluster.sbatch.nodelist takes gpu[003,017]"),
    ("+cluster.sbatch.mem-per-gpu=true", "needs a value", "64G"),
    ("+cluster.sbatch.mem-per-cpu=2 GB", "Slurm cannot read this", "cluster.sbatch.mem-per-cpu takes"),
    ("+cluster.sbatch.time_min=1h", "Slurm cannot read this", "cluster.sbatch.time-min takes minutes"),
    ("+cluster.sbatch.contiguous=yes", "takes no value", "cluster.sbatch.contiguous=true sets it"),
    ("+cluster.sbatch.reservaton=x", "no such sbatch option", "did you mean cluster.sbatch.reservation?"),
    ("+cluster.sbatch.partition=x", "it has its own key: cluster.partition", "cluster.partition=VALUE"),
    ("+cluster.sbatch.output=x", "logs are in the run directory", "~cluster.sbatch.output"),
    ("cluster.gpus=tres", "no such option", "cluster.gpus takes per-node or gres"),
    ("+restore_tests.cluster.mem=lots", "restore_tests.cluster.mem='lots'", "restore_tests.cluster.mem takes"),
    ("+restore_tests.cluster.time=1h", "restore_tests.cluster.time='1h'", "restore_tests.cluster.time takes"),
]


@pytest.mark.parametrize(("override", "what", "hint"), REFUSED)
def test_values_that_slurm_rejects_are_refused_with_a_hint(override: str, what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("tiny-gpt", [override], environ=ENVIRON)
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert f"override #1: {override}" in caught.value.where


@pytest.mark.parametrize(
    "override",
    ["cluster.mem=64G", "cluster.mem=2g", "cluster.mem=1GB", "cluster.mem=4000", "cluster.mem=8M",
     "cluster.time=1440", "cluster.mem=0", "cluster.mem=",
     "cluster.time=90", "cluster.time=1:30", "cluster.time=36:00:00", "cluster.time=2-0", "cluster.time=2-12:30:00",
     "cluster.partition=gpu,gpu-long", "cluster.qos=", "cluster.account=phys.2@uni", "cluster.constraint=[a*2&b*2]",
     "cluster.exclude=gpu[003,017],login", "cluster.signal_lead=0", "+cluster.sbatch.gres=gpu:a100:2,nvme:1",
     "+cluster.sbatch.gres=none", "+cluster.sbatch.licenses=matlab@db:2", "+cluster.sbatch.exclusive=true",
     "+cluster.sbatch.exclusive=user", "+cluster.sbatch.mail-type=END,TIME_LIMIT_80", "+cluster.sbatch.nice=100",
     "+cluster.sbatch.contiguous=true", "+cluster.sbatch.switches=1@60", "+cluster.sbatch.no-kill=off",
     "+cluster.sbatch.a-plugin-of-the-site=7"],
)  # fmt: skip
def test_values_that_slurm_reads_are_accepted(override: str) -> None:
    compose("tiny-gpt", [override], environ=ENVIRON)


def test_only_one_way_to_ask_for_memory() -> None:
    with pytest.raises(ConfigError, match="Slurm accepts only one of them") as caught:
        compose("tiny-gpt", ["cluster.mem=8G", "+cluster.sbatch.mem-per-cpu=1G"], environ=ENVIRON)
    assert caught.value.hint == "~cluster.mem or ~cluster.sbatch.mem-per-cpu"
    compose("tiny-gpt", ["+cluster.sbatch.mem-per-cpu=1G"], environ=ENVIRON)


def test_gpus_are_requested_by_one_option() -> None:
    gpus = ["cluster.ranks_per_node=2", "cluster.gpus_per_node=2"]
    for gres in ("gpu:4", "gpu", "nvme:1,gpu:a100:4", "gres/gpu:4"):
        with pytest.raises(ConfigError, match="also requests GPUs, as --gpus-per-node") as caught:
            compose("tiny-gpt", [*gpus, f"+cluster.sbatch.gres={gres}"], environ=ENVIRON)
        assert caught.value.hint.startswith("cluster.gpus=gres requests them by --gres only")
        compose("tiny-gpt", [*gpus, f"+cluster.sbatch.gres={gres}", "cluster.gpus=gres"], environ=ENVIRON)
    compose("tiny-gpt", [*gpus, "+cluster.sbatch.gres=gpu-memory:4,nvme:1"], environ=ENVIRON)


def test_spare_nodes_fill_segments() -> None:
    asked = ["cluster.nodes=32", "cluster.ranks_per_node=1", "parallel.tp=1", "parallel.dp_replicate=16"]
    batch = ["train.batch_size=32", "+cluster.sbatch.segment=18"]
    with pytest.raises(ConfigError, match="34 nodes .* do not fill segments of 18") as caught:
        compose("tiny-gpt", [*asked, *batch, "cluster.spare_nodes=2"], environ=ENVIRON)
    assert caught.value.hint.startswith("cluster.spare_nodes=4 fills them")
    compose("tiny-gpt", [*asked, *batch, "cluster.spare_nodes=4"], environ=ENVIRON)
    compose("tiny-gpt", ["+cluster.sbatch.segment=18"], environ=ENVIRON)  # all nodes fit into one segment


def test_every_form_is_of_an_option_that_is_known() -> None:
    assert {*FORMS, *FLAGS} <= KNOWN
    assert not {*FORMS} & FLAGS
