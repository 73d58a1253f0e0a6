"""Resolved configurations, and the messages for mistakes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import canonical
from orchestrator.config.compose import Composed, compose, diff
from orchestrator.errors import ConfigError, NotFound

Compose = Callable[..., Composed]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home"), "ORCH_SITE_CONFIG": ""}


@pytest.fixture
def made(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Compose:
    monkeypatch.chdir(tmp_path)

    def make(text: str, *overrides: str, name: str = "mine.yaml") -> Composed:
        (tmp_path / name).write_text(text)
        return compose(f"./{name}", overrides, environ=environ)

    return make


READS = "data: {text: [python-stdlib]}\n"


def value(data: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        data = data[name]
    return data


def test_every_value_has_its_source(made: Compose, tmp_path: Path) -> None:
    composed = made("includes: [model/tiny]\n" + READS + "train:\n  steps: 7\n", "train.seed=9", "+env.A=017")
    mine = tmp_path / "mine.yaml"
    assert composed.origins["train.steps"] == f"{mine}:4"
    assert composed.origins["train.seed"] == "override #1: train.seed=9"
    assert composed.origins["env.A"] == "override #2: +env.A=017"
    assert composed.origins["optimizer.lr"] == "default"
    assert composed.origins["model.dim"].endswith("configs/model/tiny.yaml:4")
    assert composed.config.env == {"A": "017"}
    assert composed.config.name == "mine"
    assert composed.origins["name"] == f"name of {mine}"


def test_the_digest_is_of_the_canonical_data_and_only_content_changes_it(made: Compose) -> None:
    import hashlib

    one = made(READS + "train: {steps: 7, seed: 2}\n")
    other = made("# a comment\ntrain:\n  seed: 2\n" + READS, "train.steps=7")
    assert one.digest == other.digest == hashlib.sha256(canonical(one.data)).hexdigest()
    changed = made(READS, "train.steps=8", "train.seed=2")
    assert changed.digest != one.digest
    assert diff(one.data, changed.data) == {"train.steps": (7, 8)}


def test_a_named_site_config_must_exist(made: Compose, environ: dict[str, str], tmp_path: Path) -> None:
    environ["ORCH_SITE_CONFIG"] = "/nowhere/site.yaml"
    with pytest.raises(ConfigError, match="no such file: /nowhere/site.yaml") as caught:
        made(READS)
    assert caught.value.where == "$ORCH_SITE_CONFIG"
    environ["ORCH_SITE_CONFIG"] = str(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder"):
        made(READS)


def test_includes_come_first_whatever_their_place_and_may_nest(made: Compose, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("includes: [data/python-stdlib]\ntrain: {steps: 3, seed: 3}\n")
    composed = made("train: {steps: 5}\nincludes: [./base.yaml]\n")
    assert (composed.config.train.steps, composed.config.train.seed) == (5, 3)


def test_a_circle_of_includes_is_named(made: Compose, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("includes: [./mine.yaml]\n")
    with pytest.raises(ConfigError, match="includes itself") as caught:
        made("includes: [./a.yaml]\n")
    assert "mine.yaml -> " in caught.value.hint


def test_texts_stay_as_they_were_written(made: Compose) -> None:
    composed = made(
        READS + "cluster: {time: 1:00:00, partition: no, account: 017}\nenv: {FLAG: on, N: 1e5}\n",
        "cluster.constraint=[a|b]&c",
    )
    cluster = composed.config.cluster
    assert (cluster.time, cluster.partition, cluster.account) == ("1:00:00", "no", "017")
    assert composed.config.env == {"FLAG": "on", "N": "1e5"}
    assert cluster.constraint == "[a|b]&c"


def test_numbers_in_open_maps_keep_their_type(made: Compose) -> None:
    composed = made(READS, "+workload.args.lr=1e-3", "+workload.args.deep.list=[1, {a: true}]", "+cluster.sbatch.bb=")
    assert composed.config.workload.args == {"lr": 1e-3, "deep": {"list": [1, {"a": True}]}}
    assert composed.config.cluster.sbatch == {"bb": None}


def test_options_of_sbatch_stay_as_they_were_typed(made: Compose) -> None:
    options = "{wckey: 007, extra: 1e3, comment-of-site: 1.10, nice: 5, exclusive: true, licenses: 'a:1', hint: no}"
    text = f"{READS}cluster: {{sbatch: {options}}}\n"
    sbatch = made(text, "+cluster.sbatch.mcs-label=0x1F").config.cluster.sbatch
    assert sbatch == {
        "wckey": "007", "extra": "1e3", "comment-of-site": "1.10", "nice": 5, "exclusive": True, "licenses": "a:1",
        "hint": "no", "mcs-label": "0x1F",
    }  # fmt: skip
    tests = made(READS, "+restore_tests.cluster.account=007", "+restore_tests.cluster.sbatch={wckey: 08}").config
    assert tests.restore_tests.cluster == {"account": "007", "sbatch": {"wckey": "08"}}


def test_open_maps_merge_and_entries_can_be_taken_out(made: Compose) -> None:
    text = READS + "env: {A: 1, B: 2}\n"
    composed = made(text, "env.A=3", "~env.B", "+env.C=4")
    assert composed.config.env == {"A": "3", "C": "4"}
    assert made(text, "~env").config.env == {}


def test_tilde_goes_back_to_the_default(made: Compose) -> None:
    composed = made(READS + "train: {steps: 7}\n", "~train.steps")
    assert composed.config.train.steps == 200
    assert composed.origins["train.steps"] == "default (override #1: ~train.steps)"
    assert made(READS + "train: {steps: 7, seed: 4}\n", "~train").config.train.seed == 1


def test_a_workload_is_named_by_one_string(made: Compose) -> None:
    assert made("workload: my_pkg.mod:Mine\n").config.workload.target == "my_pkg.mod:Mine"
    composed = made("workload: {args: {a: 1}}\n", "workload=my_pkg.mod:Mine")
    assert composed.config.workload.target == "my_pkg.mod:Mine"
    assert composed.config.workload.args == {"a": 1}


def test_a_command_needs_neither_data_nor_a_fitting_model(made: Compose) -> None:
    composed = made("includes: [cluster/local]\ncommand: [python, train.py, --lr, 1e-3]\n", "cluster.nodes=3")
    assert composed.config.command == ("python", "train.py", "--lr", "1e-3")


def test_checkpoints_of_a_command(made: Compose, tmp_path: Path) -> None:
    kept = made("command: [python, t.py]\ncheckpoints: {path: out, pattern: 'step-*'}\n").config.checkpoints
    assert (kept.path, kept.pattern) == ("out", "step-*")  # relative to where the command runs
    assert made("command: [python, t.py]\ncheckpoints: {path: ~/o}\n").config.checkpoints.path == f"{Path.home()}/o"
    with pytest.raises(ConfigError, match=r"checkpoints\.pattern=last: must be one name with a `\*` for the step"):
        made("command: [python, t.py]\ncheckpoints: {path: out, pattern: last}\n")
    with pytest.raises(ConfigError, match=r"checkpoints\.path=out: is only for a `command`"):
        made(READS + "checkpoints: {path: out}\n")


def test_interpolations_are_resolved_and_typed(made: Compose) -> None:
    composed = made(READS + "train: {steps: 50}\noptimizer: {warmup_steps: '${train.steps}'}\nname: s${train.seed}\n")
    assert composed.config.optimizer.warmup_steps == 50
    assert composed.config.name == "s1"


def test_folders_are_absolute(made: Compose, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    composed = made("data: {text: [texts, python-stdlib]}\ncluster: {root: runs}\n")
    assert composed.config.cluster.root == str(tmp_path / "runs")
    assert composed.config.data.text == (str(tmp_path / "texts"), "python-stdlib")


def test_drill_events_are_typed_entries(made: Compose) -> None:
    composed = made(READS, "drill.events=[{kind: raise, step: '5'}]", "drill.events=[{rank: 0, step: 6}]")
    (event,) = composed.config.drill.events
    assert (event.kind, event.rank, event.step, event.value) == ("kill-rank", 0, 6, 0.0)


def test_tiers_are_typed_entries_and_their_folders_are_the_submitting_shells(made: Compose) -> None:
    text = "[{path: $HOME/disk, shared: 'false'}, {path: run, keep: '4'}, {path: 's3://bucket/a'}, {path: deep/er}]"
    composed = made(READS, f"checkpoint.tiers={text}", "checkpoint.every=auto")
    disk, run, bucket, relative = composed.config.checkpoint.tiers
    assert disk.path.endswith("/disk")
    assert "$" not in disk.path
    assert (disk.shared, disk.keep, run.path, run.keep) == (False, 3, "run", 4)
    assert (bucket.path, relative.path) == ("s3://bucket/a", "deep/er")
    assert composed.config.checkpoint.every == "auto"
    assert composed.origins["checkpoint.tiers"] == f"override #1: checkpoint.tiers={text}"


WRONG_OVERRIDES = [
    ("train.stepps=5", "unknown key `train.stepps`", "did you mean `train.steps`?"),
    ("train.stepps=5", "unknown key `train.stepps`", "keys in `train`: steps, seed, batch_size"),
    ("steps=5", "unknown key `steps`", "did you mean `train.steps`?"),
    ("trian.steps=5", "unknown key `trian`", "did you mean `train.steps`?"),
    ("trian.foo=5", "unknown key `trian`", "did you mean `train`?"),
    ("train.steps=1e5", "`train.steps`=100000.0: must be a whole number", "its default is 200"),
    ("train.steps=abc", "`train.steps`=abc: must be a whole number", "its default is 200"),
    ("train.steps=true", "`train.steps`=True: must be a whole number", "its default is 200"),
    ("optimizer.lr=fast", "`optimizer.lr`=fast: must be a number", "its default is 0.003"),
    ("train.activation_checkpointing=maybe", "must be true or false", "its default is False"),
    ("train.steps=0", "train.steps=0: must be at least 1", "leave train.steps out"),
    (
        "train.steps=99999999999999999999",
        "must be between -9007199254740992 and 9007199254740992 (2^53)",
        "leave train.steps out",
    ),
    (
        "train.seed=-99999999999999999999",
        "must be between -9007199254740992 and 9007199254740992 (2^53)",
        "leave train.seed out",
    ),
    ("train.steps=", "`train.steps` is empty", "leave `train.steps` out"),
    ("train.steps.x=3", "`train.steps` is a single value", "train.steps=VALUE"),
    ("train=3", "`train` must be a mapping", "keys in `train`: steps"),
    ("env=3", "`env` must be a mapping", "env={key: value}"),
    ("train.steps", "no value", "train.steps=VALUE"),
    ("nonsense here", "must be key=value, +key=value or ~key", "train.steps=100"),
    ("~train.steps=3", "takes no value", "~train.steps"),
    ("+train.steps=5", "`train.steps` is not an entry of an open map", "train.steps=5"),
    ("workload.args.a=1", "`workload.args.a` is not set", "+workload.args.a=VALUE"),
    ("~env.NOPE", "`env.NOPE` is not set", "orch config show"),
    ("train.steps=[1", "not YAML", "close the bracket"),
    ("cluster.sbatch={a: 1, a: 2}", "`a` is given twice", "keep one"),
    ("+cluster.sbatch.a=!!python/object/apply:os.getcwd []", "tag `!!python/object/apply:os.getcwd`", "plain values"),
    ("command=python train.py", "must be a list of texts", "write a list: 'command=[python, train.py]'"),
    ("command={}", "`command` is {}, but must be a list of texts", "write a list: 'command=[A, B]'"),
    ("workload.path={}", "`workload.path` is {}, but must be a list of texts", "workload.path=["),
    ("env_from={a: 1}", "`env_from` is {'a': 1}, but must be a list of texts", "env_from=["),
    ("data.text={a: 1}", "`data.text` is {'a': 1}, but must be a list of texts", "data.text=["),
    ("data.text=[{a: 1}]", "an entry of `data.text` is {'a': 1}, but must be text", "leave `data.text` out"),
    ("data.text=${train}", "`data.text`=${train}: must be a list of texts", "data.text=[A, B]"),
    ("parallel.pipeline.layer_seconds={}", "is {}, but must be a list of numbers", "layer_seconds=[1, 2]"),
    ("parallel.pipeline.layer_seconds=[[1]]", "layer_seconds` is [1], but must be a number", "layer_seconds` out"),
    ("parallel.pipeline.layer_seconds=[a]", "layer_seconds` is a, but must be a number", "layer_seconds` out"),
    ("drill.events={}", "`drill.events` is {}, but must be a list of mappings", "drill.events=[{KEY: VALUE}]"),
    ("checkpoint.tiers={}", "`checkpoint.tiers` is {}, but must be a list of mappings", "[{KEY: VALUE}]"),
    ("checkpoint.tiers=[1]", "an entry of `checkpoint.tiers` is 1, but must be a mapping", "keys of an entry: path"),
    ("checkpoint.tiers=[null]", "an entry of `checkpoint.tiers` is empty, but must be a mapping", "keys of an entry"),
    ("checkpoint.tiers=['${train}']", "an entry of `checkpoint.tiers` is ${train}, but must be", "keys of an entry"),
    ("checkpoint.tiers=${data.text}", "`checkpoint.tiers`=${data.text}: must be a list of mappings", "[{KEY: VALUE}]"),
    ("data.text=python-stdlib", "must be a list of texts", "data.text=["),
    ("checkpoint.tiers=s3://b/x", "must be a list of mappings", "write a list: 'checkpoint.tiers=["),
    ("train.steps=${train.nope}", "Interpolation key 'train.nope' not found", "refers to a key, as in ${train.steps}"),
    ("drill.events=[{stepp: 3}]", "unknown key `drill.events.stepp`", "did you mean `drill.events.step`?"),
    ("drill.events=[{step: abc}]", "drill.events: `step`", "write a whole number"),
    ("drill.events=[7]", "an entry of `drill.events` is 7, but must be a mapping", "keys of an entry: kind"),
    ("drill.events=[{kind: burn}]", "kind=burn must be one of kill-rank", "leave drill.events out"),
    ("drill.events=[{rank: 9}]", "rank=9 is not one of the 4 ranks", "rank: 3"),
    ("drill.events=[{kind: skip-send}]", "drill.events: skip-send needs a pipeline", "parallel.pipeline.stages=2"),
    ("checkpoint.keep=1", "keep at least 2", "leave checkpoint.keep out"),
    ("checkpoint.every=often", "must be a number of steps, 0 (only at the end) or auto", "leave checkpoint.every out"),
    (
        "checkpoint.every=1e3",
        "`checkpoint.every`=1000.0: must be a whole number or text",
        "its default is ",
    ),
    ("checkpoint.every=-1", "checkpoint.every=-1: must be 0", "leave checkpoint.every out"),
    ("checkpoint.evry=auto", "unknown key `checkpoint.evry`", "did you mean `checkpoint.every`?"),
    ("+workload.args.augment=no", "is the word no, which YAML 1.2 reads as text", 'write false, or "no" in quotes'),
    ("cluster.root=${HOME}/runs", "Interpolation key 'HOME' not found", "a shell variable is $NAME"),
    ("workload.path=[a, '${HOME}/b']", "Interpolation key 'HOME' not found", "a shell variable is $NAME"),
    ("+env.CACHE=${HOME}/x", "Interpolation key 'HOME' not found", "and \\${ is literal"),
    ("checkpoint.auto.last=5", "unknown key `checkpoint.auto.last`", "did you mean `checkpoint.auto.least`?"),
    ("checkpoint.auto.least=0", "checkpoint.auto.least=0: must be from 1", "leave checkpoint.auto.least out"),
    (
        "checkpoint.max_unsaved_steps=5",
        "must be 0 or at least checkpoint.every=10,",
        "leave checkpoint.max_unsaved_steps out",
    ),
    ("checkpoint.stagin.mode=lazy", "unknown key `checkpoint.stagin`", "did you mean `checkpoint.staging.mode`?"),
    ("checkpoint.staging.mode=lasy", "must be block or lazy", "leave checkpoint.staging.mode out"),
    ("checkpoint.tiers=[{pth: /a}]", "unknown key `checkpoint.tiers.pth`", "did you mean `checkpoint.tiers.path`?"),
    ("checkpoint.tiers=[{path: /a, keep: many}]", "checkpoint.tiers: `keep`", "write a whole number"),
    ("checkpoint.tiers=[{path: /a, keep: 1}]", "/a: keep=1: must be at least 2", "leave checkpoint.tiers out"),
    ("checkpoint.tiers=[{path: /a, shared: false}]", "no tier is shared", "leave checkpoint.tiers out"),
    ("checkpoint.tiers=[{path: $NOPE/a}]", "the variable NOPE is not set here", "export NOPE=..."),
    ("cluster.kind=pbs", "must be auto, local or slurm", "leave cluster.kind out"),
    (
        "cluster.gpus_per_node=1",
        "must be 0 or equal cluster.ranks_per_node",
        "type cluster.gpus_per_node=2",
    ),
    ("parallel.dp_shard=3", "3 x tp=2 = 6, but cluster.nodes x cluster.ranks_per_node = 4", "parallel.dp_shard=0"),
    ("train.batch_size=15", "multiple of the 2 data-parallel ranks", "type train.batch_size=16"),
    ("train.micro_batch_size=3", "must divide the 8 sequences", "type train.micro_batch_size=0"),
    ("train.seq_len=127", "train.seq_len=127: must be a multiple of parallel.tp=2", "type parallel.tp=1"),
    ("model.ffn_dim=191", "model.ffn_dim=191: must be a multiple of parallel.tp=2", "type parallel.tp=1"),
    (
        "model.kv_heads=1",
        "model.kv_heads=1: must be a multiple of parallel.tp=2",
        "type parallel.tp=1 parallel.dp_shard=0",
    ),
    ("model.heads=0", "model.heads=0: must be at least 1", "leave model.heads out"),
    ("name=a/b", "name=a/b: must be letters", "name=my-run"),
    ("name=-x", "name=-x: must begin with a letter or digit", "name=my-run"),
    ("optimizer.lr=.inf", "optimizer.lr=inf: must be a finite number", "~optimizer.lr restores the default"),
    ("model.norm_eps=.nan", "model.norm_eps=nan: must be a finite number", "~model.norm_eps"),
    ("drill.events=[{value: .inf}]", "'value': inf", "~drill.events restores the default"),
    ("+workload.args.most=.inf", "`workload.args.most` is .inf: must be a finite number", 'write "inf" in quotes'),
    ("+workload.args.x=[1, {least: -.inf}]", "`workload.args.x.least` is -.inf: must be", 'write "-inf" in quotes'),
    ("+workload.args.most=1e999", "`workload.args.most` is 1e999: must be a finite number", "call float() on it"),
    ("+env.A-B=1", "env.A-B: is not a valid name of an environment variable", "+env.MY_VARIABLE"),
    ("workload=nonsense", "must be package.module:Class", "workload=my_pkg.my_module:MyWorkload"),
    ("workload.path=[/nowhere]", "no folder /nowhere", "workload.path=["),
    ("~data.text", "no training data is given", "data.text=[python-stdlib]"),
    ("data.path=/nowhere", "only one may be set", "'~data.text' to train on data.path, or '~data.path'"),
    ("cluster.root=", "`cluster.root`=: is empty, but must be a folder", "~cluster.root restores the default"),
    ("cluster.root=' '", "`cluster.root`= : is empty", "~cluster.root restores the default"),
    ("cluster.root=/etc/passwd", "cluster.root=/etc/passwd: is a file, but must be a folder", "cluster.root=FOLDER"),
    ("recovery.backoff=1e300", "recovery.backoff=1e+300: must be at most 604800 seconds", "~recovery.backoff"),
    ("recovery.backoff_max=1e9", "recovery.backoff_max=1e+09: must be at most 604800", "~recovery.backoff_max"),
    ("data.text=['']", "`data.text`=: is empty", "~data.text restores the default"),
    ("model.experts.count=-1", "model.experts.count=-1: must be at least 0", "leave model.experts.count out"),
    ("data.text=[/nowhere.txt]", "no such file or folder /nowhere.txt", "python-stdlib"),
]


@pytest.mark.parametrize(("override", "what", "hint"), WRONG_OVERRIDES)
def test_a_wrong_override_names_key_place_and_remedy(
    override: str, what: str, hint: str, environ: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("tiny-gpt", ["train.seed=3", override], environ=environ)
    assert what in caught.value.what
    assert f"override #2: {override}" in caught.value.where
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_spare_nodes_need_more_than_the_node_that_leads(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"cluster.spare_nodes=1 with cluster.nodes=1: .* leads the job") as caught:
        compose("tiny-gpt", ["cluster.nodes=1", "cluster.ranks_per_node=4", "cluster.spare_nodes=1"], environ=environ)
    assert "override #3: cluster.spare_nodes=1" in caught.value.where
    assert "cluster.spare_nodes=0" in caught.value.hint
    assert (
        compose("tiny-gpt", ["cluster.nodes=2", "cluster.spare_nodes=1"], environ=environ).config.cluster.all_nodes == 3
    )


def test_a_run_is_a_command_or_a_workload(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="one or the other") as caught:
        compose("tiny-gpt", ["command=[python]", "workload=a.b:C"], environ=environ)
    assert "override #1" in caught.value.where
    assert "override #2" in caught.value.where


def test_missing_data_folder(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="data.path=/nowhere: no such folder") as caught:
        compose("tiny-gpt", ["~data.text", "data.path=/nowhere"], environ=environ)
    assert caught.value.hint == "orch data prepare YOUR-TEXTS --out /nowhere"


WRONG_FILES = [
    ("train: {steps: [1\n", "not YAML", 2),
    ("a: b: c\n", "not YAML", 1),
    ("- a\n- b\n", "must be a mapping, not a list", None),
    ("just words\n", "must be a mapping, not a single value", None),
    ("train:\n  steps: 1\n  steps: 2\n", "`steps` is given twice", 3),
    ("train:\n  stepps: 1\n", "unknown key `train.stepps`", 2),
    ("x: !!python/object:os.system {}\n", "not allowed", 1),
    ("a: &a [*a]\n", "expand without end", None),
    (f"name: {'[' * 1000}{']' * 1000}\n", "nested too deeply", None),
    ("---\na: 1\n---\nb: 2\n", "not YAML", 3),
    ("train:\n  steps: many\n", "`train.steps`=many", 2),
    ("includes: [model/tinny]\n", "no preset `model/tinny`", 1),
    ("includes: {a: 1}\n", "`includes`", 1),
    ("workload: {args: {x: 1,\n    augment: [{a: Off}]}}\n", "`workload.args.augment.a` is the word Off", 2),
    ("workload:\n  args: {none: .nan}\n", "`workload.args.none` is .nan: must be a finite number", 2),
    ("? [a, b]\n: 1\n", "a key must be a word", 1),
    ("name: \n", "`name` is empty", 1),
    ("env: {A: [1]}\n", "`env.A` is [1], but must be text", 1),
    ("name: x\nenv_from: {WANDB_API_KEY: }\n", "`env_from` is {'WANDB_API_KEY': None}, but must be a list of texts", 2),
    ("data: {text: {path: a}}\n", "`data.text` is {'path': 'a'}, but must be a list of texts", 1),
]


@pytest.mark.parametrize(("text", "what", "line"), WRONG_FILES)
def test_a_wrong_file_is_refused_at_its_line(
    text: str, what: str, line: int | None, made: Compose, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(text)
    assert what in caught.value.what
    where = str(tmp_path / "mine.yaml")
    assert where in caught.value.where
    assert line is None or caught.value.where == f"{where}:{line}"
    assert caught.value.hint


def test_a_misspelled_includes_is_recognized(made: Compose) -> None:
    with pytest.raises(ConfigError, match="unknown key `include`") as caught:
        made("include: [model/tiny, demo]\n")
    assert caught.value.hint.startswith("did you mean `includes`?")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    for content in (b"\xff\xfe\x00\x01", b"a: \x00\n"):
        (tmp_path / "bad.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match="not YAML"):
            compose(str(tmp_path / "bad.yaml"), environ=environ)


@pytest.mark.parametrize("source", ["tiny_gpt", "tinygpt", "tiny-gpt.yaml", "./tiny-gpt"])
def test_a_missing_config_offers_the_nearest_preset(
    source: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound) as caught:
        compose(source, environ=environ)
    assert "did you mean tiny-gpt" in caught.value.hint


@pytest.mark.parametrize("source", ["pipe", "./pipe", "pipe.yaml", "/dev/zero"])
def test_pipes_and_devices_are_not_read(
    source: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.yaml")
    with pytest.raises(NotFound, match="is a pipe or a device; only regular files are read") as caught:
        compose(source, environ=environ)
    assert caught.value.hint == "write the configuration to a regular file, and use that"


@pytest.mark.parametrize("source", ["", "qqqqqqq", "."])
def test_a_hopeless_config_lists_the_presets(source: str, environ: dict[str, str]) -> None:
    with pytest.raises(NotFound) as caught:
        compose(source, environ=environ)
    assert "presets: demo, slurm-first-run, tiny-gpt, torchrun-script" in caught.value.hint


def test_folders_may_be_written_with_variables_of_the_shell(
    made: Compose, environ: dict[str, str], tmp_path: Path
) -> None:
    environ["SCRATCH"] = str(tmp_path / "scratch")
    for written in ("$SCRATCH/runs", r"\${SCRATCH}/runs", "$SCRATCH//x/../runs"):
        assert made(READS, f"cluster.root={written}").config.cluster.root == str(tmp_path / "scratch" / "runs")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="dangling: is a broken link"):
        made(READS, "cluster.root=dangling")
    environ["EMPTY"] = ""
    with pytest.raises(ConfigError, match=r"cluster.root`=\$EMPTY: is empty"):
        made(READS, "cluster.root=$EMPTY")
    with pytest.raises(ConfigError, match=r"cluster.root`=\$SCRATHC/runs: the variable SCRATHC is not set") as refused:
        made(READS, "cluster.root=$SCRATHC/runs")
    assert refused.value.where == "override #1: cluster.root=$SCRATHC/runs"
