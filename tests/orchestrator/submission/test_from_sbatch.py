"""Conversion of sbatch scripts: `sbatch_scripts/NAME.sh` becomes `sbatch_scripts/NAME.expected`."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError, NotFound
from orchestrator.scheduler.slurm import slurm_scheduler
from orchestrator.submission.create_run import first_job
from orchestrator.submission.from_sbatch.convert import ConvertedScript, convert
from orchestrator.submission.from_sbatch.launch import Remark
from orchestrator.submission.from_sbatch.shell_text import expand, read_lines, tokenize, unquote

SCRIPTS = sorted((Path(__file__).parent / "sbatch_scripts").glob("*.sh"))
SHELL = {"SCRATCH": "/scratch/me", "WORK": "/work/me", "HF_TOKEN": "hf_secret", "PATH": os.environ["PATH"]}
"""Variables of the shell from which the user submits."""
SETTINGS = {"cluster.nodes": "1", "cluster.ranks_per_node": "1", "cluster.time": "60"}
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCH_USER_CONFIG", "")
    monkeypatch.setenv("ORCH_SITE_CONFIG", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def remark_lines(title: str, remarks: tuple[Remark, ...]) -> list[str]:
    rows = [f"  {item.line}: {' '.join(item.text.split())}: {item.why}" for item in remarks]
    return [f"--- {title}", *rows]


def as_text(made: ConvertedScript, here: Path) -> str:
    """Return everything that a conversion gives, as one text."""
    parts = [made.config, "--- setup", made.setup, *remark_lines("left out", made.left_out)]
    parts += [*remark_lines("not understood", made.unclear), "--- to set"]
    parts += [f"  {key}: {why}" for key, why in made.open_keys.items()]
    return "\n".join(parts).replace(str(here), "/HERE") + "\n"


@every_script
def test_a_script_becomes_the_expected_configuration(script: Path, here: Path) -> None:
    found = as_text(convert(script, SHELL), here)
    if os.environ.get("WRITE_EXPECTED"):  # after a deliberate change; read the difference before a commit
        script.with_suffix(".expected").write_text(found)
    assert found == script.with_suffix(".expected").read_text()


@every_script
def test_the_configuration_gives_a_job_script_that_bash_can_read(script: Path, here: Path) -> None:
    made = convert(script, SHELL)
    (here / "job.yaml").write_text(made.config)
    (here / f"{script.stem}.setup.sh").write_text(made.setup)
    composed = compose("./job.yaml", [f"{key}={SETTINGS[key]}" for key in made.open_keys])
    job = slurm_scheduler.render(first_job(composed.config, "slurm"))
    done = subprocess.run(["bash", "-n"], input=job, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = composed.config.command[2] if composed.config.command[:2] == ("bash", "-c") else ""
    assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0


def one_line(tail: str, head: str = "#SBATCH -N 1 -t 60\n") -> ConvertedScript:
    Path("job.sh").write_text(f"#!/bin/bash\n{head}{tail}\n")
    return convert(Path("job.sh"), SHELL)


REFUSED = [
    ("echo no training", "no line starts a training program"),
    ("srun python a.py\nsrun python b.py", "lines 3 and 4 each start a program"),
    ("for x in 1 2; do\n  srun python a.py\ndone", "inside a loop"),
    ("if true; then srun python a.py; fi", "inside a loop"),
    ("srun python 'a.py", "bash cannot read it"),
    ("#SBATCH hetjob\n#SBATCH -N 2\nsrun python a.py", r"`#SBATCH hetjob` begins another component"),
    ("#SBATCH packjob \nsrun python a.py", r"`#SBATCH packjob` begins another component"),
    ("srun -n 1 python a.py : -n 3 python b.py", "srun starts several programs, one after each `:`"),
    ("srun ./server : ./client", "srun starts several programs, one after each `:`"),
]


@pytest.mark.parametrize(("tail", "why"), REFUSED)
def test_a_script_without_one_clear_launch_line_is_refused(tail: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        one_line(tail)


def test_conditions_before_the_launch_line_stay_whole() -> None:
    tail = """[[ -f env.sh ]] && source env.sh
[ -n "$SCRATCH" ] || exit 1
if [ -d /data ]; then
  export DATA=/data
  UNUSED=1
  cat <<E
x
E
else DATA=/other
fi
case "$1" in a) X=1;; esac
(
  cd /
)
f() {
  echo in f
}
srun python train.py --data $DATA < input.txt"""
    made = one_line(tail)
    lines = made.setup.splitlines()
    first = lines.index("if [ -d /data ]; then")
    assert lines[first : first + 6] == [
        "if [ -d /data ]; then", "  export DATA=/data", "  UNUSED=1", ":", "else DATA=/other", "fi",
    ]  # fmt: skip
    assert {item.text for item in made.unclear} == {"  cat <<E", "$1", "< input.txt"}
    assert '"PATH=$JOB_PATH PYTHONPATH=$JOB_PYTHONPATH exec python train.py --data $DATA"' in made.config


def test_a_program_that_only_the_job_knows_is_pointed_out() -> None:
    made = one_line("if true; then CMD='torchrun x.py'; else CMD='python x.py'; fi\nsrun $CMD")
    assert [(item.text, "known only in the job" in item.why) for item in made.unclear] == [("$CMD", True)]


def test_a_file_that_is_no_shell_script_is_refused(here: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        convert(here / "gone.sh", SHELL)
    (here / "train.py").write_text("#!/usr/bin/env python\nprint(1)\n")
    with pytest.raises(ConfigError, match="its interpreter is not a shell"):
        convert(here / "train.py", SHELL)
    (here / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        convert(here / "binary", SHELL)
    os.mkfifo(here / "pipe")
    for path, kind in ((here / "pipe", "a pipe"), (here, "a folder"), (Path("/dev/null"), "a device")):
        with pytest.raises(ConfigError, match=f"is {kind}, not a file with a job script") as caught:
            convert(path, SHELL)
        assert caught.value.where == str(path)


def test_the_environment_of_the_program_is_the_one_of_the_script(here: Path) -> None:
    """The setup of the job, then the command of a rank, give a program what the script itself would give it."""
    program = here / "bin" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@" "$A" "$B" "$PYTHONPATH" "$PWD"\n')
    program.chmod(0o755)
    (here / "env.sh").write_text(f"export PATH={here}/bin:$PATH PYTHONPATH=/lib/mine\n")
    (here / "sub").mkdir()
    tail = "source ./env.sh\nexport A='x y'\nB=$(echo \"b c\")\nexport B\ncd sub\npython train.py --x \"$B\" '$Q' a\\ b"
    (here / "run.sh").write_text(f"#!/bin/bash\n{tail}\n")
    wanted = subprocess.run(["bash", "run.sh"], capture_output=True, text=True, check=True).stdout
    made = one_line(tail)
    (here / "job.yaml").write_text(made.config)
    (here / "job.setup.sh").write_text(made.setup)
    config = compose("./job.yaml").config
    setup = made.setup.replace("{% raw %}", "").replace("{% endraw %}", "").replace("{{ run_dir }}", str(here))
    rank = f'{setup}\nexport PATH=/usr/bin:/bin; exec env A="x y" bash -c "$0"'
    done = subprocess.run(["bash", "-c", rank, config.command[2]], capture_output=True, text=True, check=True, cwd=here)
    assert config.env["A"] == "x y"
    assert done.stdout == wanted


def test_values_keep_their_text(here: Path) -> None:
    values = {
        "A": "FALSE",
        "B": "1e5",
        "C": "null",
        "D": "yes",
        "E": "",
        "F": "0x10",
        "G": "a: b",
        "H": "${x}",
        "I": "é",
    }
    exports = " ".join(f"{name}='{value}'" for name, value in values.items())
    made = one_line(f"export {exports}\nsrun python train.py --x '${{y}}' null 007")
    (here / "job.yaml").write_text(made.config)
    config = compose("./job.yaml").config
    assert config.env == values
    assert config.command == ("python", "train.py", "--x", "${y}", "null", "007")


WORDS = ["a", "b c", "$x", "'", '"', "\\", "`", "#", ";", "&", "é", "*", "(", ")", "{", "~", "\t", "=", "!", "|", ">"]


@pytest.mark.parametrize("seed", range(3))
def test_words_are_read_as_bash_reads_them(seed: int) -> None:
    """Literal words in any quotes: the same arguments as from bash."""
    chance = random.Random(seed)
    lines, wanted = [], []
    for _ in range(60):
        words = ["".join(chance.choice(WORDS) for _ in range(chance.randint(1, 4))) for _ in range(3)]
        lines.append(" ".join(quote(word, chance) for word in words))
        wanted.append(words)
    script = "".join(f"printf '%s\\0' {line}\n" for line in lines)
    told = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True).stdout.decode().split("\0")
    assert told[:-1] == [word for words in wanted for word in words]
    assert [[unquote(token.raw) for token in tokenize(line)] for line in lines] == wanted


def quote(word: str, chance: random.Random) -> str:
    """Return the word in one of bash's ways to quote, mixed within the word."""
    pieces = []
    for char in word:
        if char == "'" or chance.random() < 0.4:
            pieces.append('"' + "".join(f"\\{one}" if one in '$`"\\' else one for one in char) + '"')
        else:
            pieces.append(f"'{char}'" if chance.random() < 0.5 or char == "\n" else f"\\{char}")
    return "".join(pieces)


def test_variables_are_filled_in_as_bash_does() -> None:
    values = {"A": "x", "N": "3", "M": "4"}
    assert expand("$A ${A}y '$A' \"$A '$A'\" \\$A $B ${A:-z}", values) == "x xy '$A' \"x 'x'\" \\$A $B x"
    assert expand("${B:-z} ${A:+z} ${A:-$(b)}", values) == "${B:-z} ${A:+z} x"
    assert expand("$((N * M)) $((M/N)) $(($N-1)) $((N+Q))", values) == "12 1 2 $((3+Q))"


def test_lines_continue_and_nest() -> None:
    text = 'a \\\n  b\n# c\nif x; then\n  d\nfi\ncat <<E\nif\nE\nf "g\nh" $(i\n)\n(j; k)\nl'
    found = [(line.number, line.words, line.is_nested, line.has_document) for line in read_lines(text)]
    assert found == [
        (1, ["a", "b"], False, False), (4, ["if", "x", "then"], True, False), (5, ["d"], True, False),
        (6, ["fi"], True, False), (7, ["cat", "E"], False, True), (10, ["f", '"g\nh"', "$(i\n)"], False, False),
        (13, ["j", "k"], False, False), (14, ["l"], False, False),
    ]  # fmt: skip


def test_setup_lines_run_in_the_folder_of_chdir(here: Path) -> None:
    script = here / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH -N 1 -t 60\n#SBATCH -D /data/run\ncd sub || exit 1\npython train.py\n")
    setup = convert(script, SHELL).setup
    assert "cd /data/run || exit 1" in setup
    assert str(here) not in setup


@pytest.mark.parametrize("line", ["set -e; for seed in 1 2; do python train.py; done", "run() { python train.py; }"])
def test_a_launch_line_inside_something_on_one_line_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="inside a loop, a condition, a function or a group"):
        one_line(f"{line}\n")


@pytest.mark.parametrize("limit", ["0", "0:00", "UNLIMITED", "-1"])
def test_a_job_without_a_time_limit_leaves_the_key_open(limit: str) -> None:
    made = one_line("python train.py", f"#SBATCH -N 1 -t {limit}\n")
    assert made.open_keys["cluster.time"].startswith(f"-t {limit} asks for no limit")
    assert " time:" not in made.config
    assert made.unclear == ()


FOLDERS = [
    ("pushd sub", ["sub"]),
    ("pushd sub > /dev/null\npython prepare.py; popd", []),
    ("cd a && pushd b; cd c\npopd", ["a"]),
    ("echo begin; cd sub", ["sub"]),
    ("cd sub || exit 1", ["sub"]),
    ("(cd build && make)", []),
    ("cd /scratch; cd $SLURM_SUBMIT_DIR", ["/scratch", "$SLURM_SUBMIT_DIR"]),
]


@pytest.mark.parametrize(("lines", "folders"), FOLDERS)
def test_ranks_begin_in_the_folder_that_the_script_has_entered(lines: str, folders: list[str]) -> None:
    made = one_line(f"{lines}\nsrun python train.py")
    entered = "".join(f"cd {folder} && " for folder in folders)
    assert (f'"{entered}exec python train.py"' in made.config) == bool(folders), made.config
    assert made.unclear == ()


@pytest.mark.parametrize("line", ["pushd +1", "popd", "cd -", "pushd"])
def test_a_change_of_the_folder_that_ranks_do_not_follow_is_pointed_out(line: str) -> None:
    made = one_line(f"{line}\nsrun python train.py")
    assert [(item.text, "write `cd FOLDER`" in item.why) for item in made.unclear] == [(line, True)]


@pytest.mark.parametrize("shell", [{}, {"LR": "5", "OUT": "here"}], ids=["unset", "set"])
@pytest.mark.parametrize(
    "tail",
    [
        "python train.py ${LR:-1e-4} ${OUT-$SCRATCH/out}",
        "LR=${LR:-1e-4}\nexport OUT=${OUT:-out}\npython train.py $LR $OUT",
        ': ${LR:=1e-4}\npython train.py $LR "${OUT:=a b}"',
    ],
)
def test_defaults_of_variables_give_what_bash_gives(here: Path, tail: str, shell: dict[str, str]) -> None:
    """Neither a wrong value nor a warning: the job's setup and the rank's command against the script itself."""
    program = here / "bin" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environ = {"PATH": f"{program.parent}:/usr/bin:/bin", "SCRATCH": "/scratch/me", **shell}
    (here / "job.sh").write_text(f"#!/bin/bash\n#SBATCH -N 1 -t 60\n{tail}\n")
    made = convert(here / "job.sh", environ)
    (here / "job.yaml").write_text(made.config)
    (here / "job.setup.sh").write_text(made.setup)
    config = compose("./job.yaml").config
    setup = made.setup.replace("{% raw %}", "").replace("{% endraw %}", "").replace("{{ run_dir }}", str(here))
    job = {"PATH": environ["PATH"], **config.env}
    rank = ["bash", "-c", f'{setup}\nexec "$@"', "job", *config.command]
    found, wanted = (
        subprocess.run(words, env=given, capture_output=True, text=True, check=True).stdout
        for words, given in ((rank, job), (["bash", "job.sh"], environ))
    )
    assert found == wanted
    assert made.unclear == ()
