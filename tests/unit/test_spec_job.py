"""Job files as people write them, right and wrong."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from dtrain.errors import Problem, SpecError
from dtrain.spec import Command, JobSpec, Module, Overrides, Script, load_job, this_machine
from dtrain.trainers.config import BatchConfig, PipelineConfig, TrainerConfig

TRAINER = "trainer: {model: digits_cnn, data: digits, epochs: 3}\n"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files that a user has there, so that paths in messages are as short as the user's own."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("code").mkdir()
    Path("code/main.py").touch()
    Path("lab.yaml").write_text("instances: [a, b]\n")


def job(text: str, *, arguments: tuple[str, ...] = (), environ: Mapping[str, str] | None = None, cluster: Path | None = None) -> JobSpec:
    Path("job.yaml").write_text(textwrap.dedent(text))
    return load_job(Path("job.yaml"), Overrides(cluster=cluster, arguments=arguments), environ=environ or {})


def problems(text: str, **around: object) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        job(text, **around)  # type: ignore[arg-type]
    return caught.value.problems


def test_the_shortest_script_job_has_every_default(tmp_path: Path) -> None:
    spec = job("script: train.py")
    assert spec == JobSpec(
        path=tmp_path / "job.yaml",
        name=tmp_path.name,
        cluster=this_machine(),
        launcher="torchrun",
        workdir=tmp_path,
        sync=True,
        outputs="out",
        env={},
        secrets=(),
        run=Script("train.py", ()),
        grace=30.0,
    )


def test_the_shortest_trainer_job_has_the_trainers_defaults() -> None:
    assert job(TRAINER).run == TrainerConfig("digits_cnn", "digits", BatchConfig(per_replica=64), epochs=3)


def test_a_full_trainer_reaches_its_config_with_the_files_keys() -> None:
    spec = job("""
        trainer:
          model: my_models.nets:resnet
          data: digits
          batch: {global: 256, micro_batches: 4}
          iterations: 500
          learning_rate: 1e-3
          optimizer: adamw
          seed: 7
          pipeline: {stages: 2, schedule: simple, partition: uniform}
    """)
    batch = BatchConfig(global_=256, micro_batches=4)
    pipeline = PipelineConfig(stages=2, schedule="simple", partition="uniform")
    expected = TrainerConfig(
        "my_models.nets:resnet", "digits", batch, iterations=500, learning_rate=0.001, optimizer="adamw", seed=7, pipeline=pipeline
    )
    assert spec.run == expected
    assert TrainerConfig.from_json(expected.to_json()) == expected  # as a worker gets it


@pytest.mark.parametrize(("typed", "number"), [("1e-3", 0.001), ("0.5", 0.5), (".5", 0.5), ("1", 1.0), ("1E+2", 100.0), ("3.", 3.0)])
def test_a_number_may_be_written_in_any_common_way(typed: str, number: float) -> None:
    assert job(f"script: train.py\ngrace: {typed}\n").grace == number


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "08",
        "on",
        "yes",
        "1.10",
        "12:30",
        "null",
        "~",
        "0x10",
        "2024-01-01",
        "true",
        "1_000",
        "$(reboot)",
        "a$HOME",
        "😀 ü",
        "back\\slash",
    ],
)
def test_text_stays_as_it_is_typed(text: str) -> None:
    spec = job(f"script: train.py\nname: n\nenv:\n  A: {text}\nargs:\n- {text}\n- --x\n")
    assert spec.env == {"A": text}
    assert spec.run == Script("train.py", (text, "--x"))


@pytest.mark.parametrize(
    "text", ["", "a\nb", 'it\'s "so"', "$(x) `y` $Z ;&|", " spaces ", "\t", "😀", "#not a comment", "\x85", "{a: b}", "*x", "%"]
)
def test_hostile_text_comes_through_quotes_unchanged(text: str) -> None:
    quoted = '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'
    spec = job(f"script: train.py\nenv: {{A: {quoted}}}\nargs: [{quoted}]\n")
    assert spec.env == {"A": text}
    assert spec.run == Script("train.py", (text,))


def test_args_as_a_string_are_split_as_a_shell_does_and_not_expanded() -> None:
    spec = job("""
        script: train.py
        args: --lr 1e-4 --name 'two words' $HOME *.py "q\\"q" #5
    """)
    assert spec.run == Script("train.py", ("--lr", "1e-4", "--name", "two words", "$HOME", "*.py", 'q"q'))


def test_arguments_follow_the_jobs_args() -> None:
    assert job("script: train.py\nargs: -a 1", arguments=("-b", "x y")).run == Script("train.py", ("-a", "1", "-b", "x y"))
    assert job("module: pkg.train", arguments=("-b",)).run == Module("pkg.train", ("-b",))
    assert job("command: [accelerate, launch, 08]", arguments=("-b",)).run == Command(("accelerate", "launch", "08", "-b"))


def test_a_command_text_sees_its_arguments_as_bash_does() -> None:
    run = job("command: exec prog \"$@\"\nargs: [1, 'a b']").run
    assert run == Command(("bash", "-c", 'exec prog "$@"', "bash", "1", "a b"))


def test_an_empty_variable_is_taken_from_the_environment_and_a_quoted_empty_one_is_empty() -> None:
    spec = job("script: train.py\nenv: {HF_HOME: , EMPTY: ''}", environ={"HF_HOME": "/data", "EMPTY": "no"})
    assert spec.env == {"HF_HOME": "/data", "EMPTY": ""}


def test_secrets_are_kept_as_names_alone() -> None:
    spec = job("script: train.py\nsecrets: [WANDB_API_KEY]", environ={"WANDB_API_KEY": "hunter2"})
    assert spec.secrets == ("WANDB_API_KEY",)
    assert "hunter2" not in repr(spec)


def test_empty_lists_and_mappings_are_the_same_as_none() -> None:
    spec = job("script: train.py\nenv:\nargs:\nsecrets:\nname:\n")
    assert (spec.env, spec.secrets, spec.run) == ({}, (), Script("train.py", ()))


def test_a_script_is_found_in_workdir(tmp_path: Path) -> None:
    for script in ("main.py", "./main.py", tmp_path / "code" / "main.py"):
        spec = job(f"workdir: code\nscript: {script}")
        assert (spec.workdir, spec.run) == (tmp_path / "code", Script("main.py", ()))


def test_a_script_is_found_by_its_real_path_behind_a_linked_folder(tmp_path: Path) -> None:
    Path("link").symlink_to("code")
    Path("code/job.yaml").write_text(f"script: {tmp_path}/code/main.py")
    assert load_job(Path("link/job.yaml"), environ={}).run == Script("main.py", ())


def test_a_job_is_read_from_a_current_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("job.yaml").write_text("script: train.py\n")
    Path("gone").mkdir()
    monkeypatch.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert load_job(tmp_path / "job.yaml", environ={}).run == Script("train.py", ())


def test_a_script_named_like_an_option_is_not_taken_for_one() -> None:
    Path("-c.py").touch()
    assert job("script: -c.py").run == Script("./-c.py", ())


def test_a_workdir_on_the_nodes_is_not_looked_for_here() -> None:
    spec = job("workdir: /shared/project\nsync: false\nscript: not/here.py")
    assert (spec.workdir, spec.sync, spec.run) == (Path("/shared/project"), False, Script("not/here.py", ()))


def test_a_job_in_a_folder_with_an_odd_name_gets_a_safe_one(tmp_path: Path) -> None:
    folder = tmp_path / ".über zwei; rm"
    folder.mkdir()
    (folder / "job.yaml").write_text("command: ['true']")
    assert load_job(folder / "job.yaml").name == "ber-zwei-rm"


def test_a_path_with_dots_finds_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("job.yaml").write_text("workdir: code/..\nscript: train.py")
    monkeypatch.chdir("code")
    spec = load_job(Path("../job.yaml"))
    assert (spec.path, spec.name, spec.workdir) == (tmp_path / "job.yaml", tmp_path.name, tmp_path)


def test_a_cluster_is_a_file_beside_the_job_or_stands_in_it_or_is_given(tmp_path: Path) -> None:
    beside = job("script: train.py\ncluster: lab.yaml").cluster
    assert (beside.path, [i.name for i in beside.instances]) == (tmp_path / "lab.yaml", ["a", "b"])
    inline = job("script: train.py\ncluster: {instances: 2}").cluster
    assert (inline.path, [(i.name, i.host) for i in inline.instances]) == (None, [("node0", None), ("node1", None)])
    Path("other.yaml").write_text("instances: [c]")
    given = job("script: train.py\ncluster: not-there.yaml", cluster=Path("other.yaml")).cluster
    assert [i.name for i in given.instances] == ["c"]


S = "script: train.py\n"

# (what is in job.yaml, where the mistake is, a part of the message, a part of the hint)
WRONG = [
    ("scirpt: train.py", "1:1", "unknown key 'scirpt'", "did you mean 'script'?"),
    (S + "module: x", "2:1", "script and module stand here", "keep one"),
    ("script:", "1:1", "script is empty", "train.py"),
    ("script: [train.py]", "1:9", "script must be text, not a list", "write `script: train.py`"),
    ("script: code/mian.py", "1:9", "script 'code/mian.py' is not there", "did you mean 'code/main.py'?"),
    ("script: xyz", "1:9", "script 'xyz' is not there", "looked for in"),
    ("script: train.py --lr 1", "1:9", "is not there", "under args"),
    ("script: /etc/passwd", "1:9", "outside of workdir", "workdir"),
    ("module: train.py", "1:9", "no module's name", "script: train.py"),
    ("module: a-b", "1:9", "no module's name", "python -m"),
    ("command: ['']", "1:11", "names no program", "accelerate"),
    ("command: []", "1:10", "names no program", "accelerate"),
    ("command: run me\nargs: x", "1:10", "does not use that", '"$@"'),
    (S + "workdir: train.py", "2:10", "is not a folder", "folder"),
    (S + "sync: false", "2:7", "wants a workdir that all nodes have", "absolute"),
    (S + "sync: false\nworkdir: /shared\noutputs: out", "4:10", "with sync: false none is", "an absolute path"),
    (S + "sync: false\nworkdir: code", "3:10", "wants a workdir that all nodes have", "absolute"),
    (S + "sync:", "2:1", "sync must be true or false, but nothing is there", "remove the key"),
    (S + "outputs: ../out", "2:10", "neither a folder inside workdir nor an absolute path", "without '..'"),
    (S + "outputs: /a/../b", "2:10", "neither a folder inside workdir nor an absolute path", "without '..'"),
    (S + "outputs: //", "2:10", "neither a folder inside workdir nor an absolute path", "without '..'"),
    (S + "outputs: .", "2:10", "neither a folder inside workdir nor an absolute path", "without '..'"),
    (S + "name: a/b", "2:7", "'a/b' cannot be a folder's name", "'a-b'"),
    (S + "name: ..", "2:7", "cannot be a folder's name", "'job'"),
    (S + "name: ''", "2:7", "cannot be a folder's name", "'job'"),
    (S + f"name: {'x' * 101}", "2:7", "cannot be a folder's name", "at most 100"),
    (S + "launcher: slurm", "2:11", "launcher must be 'torchrun', 'mpirun' or 'none', not 'slurm'", ""),
    (
        "trainer: {model: digits_cnn, data: digits, epochs: 1}\nlauncher: none",
        "2:11",
        "launcher: none starts no workers",
        "use torchrun or mpirun",
    ),
    (S + "grace: .inf", "2:8", "grace must be a number, not '.inf'", ""),
    (S + "grace: 1e999", "2:8", "grace must be a number, not '1e999'", ""),
    (S + "env: [A=1]", "2:6", "env must be a mapping, not a list", ""),
    (S + "env:\n  A: [1]", "3:6", "env.A must be text, not a list", "quotes"),
    (S + "env:\n  A=B: 1", "3:3", "'A=B' cannot be a variable's name", "A: value"),
    (S + "env:\n  ? ''\n  : 1", "3:5", "cannot be a variable's name", "NAME: value"),
    (S + "secrets: [A=hunter2]", "2:11", "by its name alone", "never stands in a file"),
    (S + "env: {SET: x}\nsecrets: [SET]", "3:11", "SET stands in env too", "remove it"),
    (S + "secrets: [SET, SET]", "2:16", "SET stands here a second time", "remove"),
    (S + "args: it's", "2:7", "a quote without its partner", "list"),
    (S + "args:\n- a\n-", "4:2", "args[1] must be text, but nothing is there", 'write ""'),
    (S + "args:\n- {a: b}", "3:3", "args[0] must be text, not a mapping", "quotes"),
    (S + "args: {a: b}", "2:7", "args must be text or a list, not a mapping", "write `args: --a b`"),
    (S + "setup: ' '", "2:8", "setup is empty", "such as `setup: pip install -r requirements.txt`"),
    (S + "instances: [a]", "2:1", "unknown key 'instances'", "under `cluster:`"),
    (S + "cluster:", "2:1", "cluster is empty", "this machine"),
    (S + "cluster: ''", "2:10", "cluster is empty", "this machine"),
    (S + "cluster: code", "2:10", "the cluster 'code' is a folder", "a file in it"),
    (S + "cluster: {instances: [a], adress: b}", "2:27", "unknown key 'adress'", "a key of `cluster.instances`"),
    (TRAINER + "args: x", "2:1", "not for a trainer", "keys"),
    ("trainer:", "1:1", "trainer is empty", "model"),
    ("trainer: digits", "1:10", "trainer must be a mapping, not 'digits'", "`trainer: {model: digits_cnn, data: digits, epochs: 3}`"),
    ("trainer: {model: digits_cnn, data: digits}", "1:1", "trainer lacks one of epochs and iterations", "how long"),
    ("trainer: {model: digits_cnn, data: digits, epoch: 1}", "1:44", "unknown key 'epoch'", "did you mean 'epochs'?"),
    ("trainer: {model: digits_cnn, data: cifar, epochs: 1}", "1:36", "no built-in 'cifar'", "package.module:function"),
    ("trainer: {model: 'a:b c', data: digits, epochs: 1}", "1:18", "not of the form package.module:function", "for example"),
]
P4 = "  batch: {global: 64, micro_batches: 4}\n  pipeline: "
WRONG += [
    ("trainer:\n  model: digits_cnn\n  data: digits\n  epochs: 1\n" + text, where, message, hint)
    for text, where, message, hint in [
        ("  seed: 12:30", "5:9", "trainer.seed must be a whole number, not '12:30'", ""),
        ("  seed: 1.5", "5:9", "trainer.seed must be a whole number, not '1.5'", ""),
        ("  seed: '8'", "5:9", "trainer.seed must be a whole number, not '8'", "remove the quotes"),
        ("  seed: -1", "5:9", "trainer.seed must be at least 0, not -1", ""),
        ("  learning_rate: 0", "5:18", "trainer.learning_rate must be above 0, not 0", ""),
        ("  learning_rate: fast", "5:18", "trainer.learning_rate must be a number, not 'fast'", ""),
        ("  optimizer: sdg", "5:14", "trainer.optimizer must be 'sgd' or 'adamw', not 'sdg'", "did you mean 'sgd'?"),
        ("  batch: {}", "5:3", "trainer.batch lacks one of global and per_replica", "add one"),
        ("  batch: {globl: 8}", "5:11", "unknown key 'globl'", "did you mean 'global'?"),
        ("  batch: {global_: 8}", "5:11", "unknown key 'global_'", "did you mean 'global'?"),
        ("  batch: {global: 0}", "5:19", "trainer.batch.global must be at least 1, not 0", ""),
        ("  batch: {per_replica: 4, micro_batches: -2}", "5:42", "trainer.batch.micro_batches must be at least 1", ""),
        ("  batch: 64", "5:10", "trainer.batch must be a mapping, not '64'", "write `batch: {global: 64}`"),
        ("  pipeline: {schedule: 1F1B}", "5:3", "trainer.pipeline lacks the key 'stages'", "add it"),
        ("  pipeline: {stage: 2, stages: 1}", "5:14", "unknown key 'stage'", "did you mean 'stages'?"),
        ("  pipeline: {stages: 0}", "5:22", "trainer.pipeline.stages must be at least 1, not 0", ""),
        (P4 + "{stages: 10, schedule: simple}", "6:22", "stages is 10, and digits_cnn has 9 layers", "at most 9"),
        (P4 + "{stages: 2, schedule: gpipe}", "6:35", "'1F1B', 'GPipe', 'interleaved' or 'simple'", "did you mean 'GPipe'?"),
        (P4 + "{stages: 2, partition: even}", "6:36", "trainer.pipeline.partition must be 'parameters' or 'uniform'", ""),
        (P4 + "{stages: 5}", "5:38", "1F1B with 5 stages wants as many micro-batches or more, not 4", "at least 5"),
        ("  pipeline: {stages: 2, schedule: GPipe}", "1:1", "with 1 micro-batch 2 stages work one after the other", "micro_batches: 8"),
        (P4 + "{stages: 2}\n  data_parallel: ddp", "7:18", "DDP cannot hold the stages of a pipeline", "leave data_parallel out"),
    ]
]


@pytest.mark.parametrize(("text", "where", "message", "hint"), WRONG, ids=[f"{row[2]} {row[1]}" for row in WRONG])
def test_a_mistake_is_named_once_with_its_place_and_a_hint(text: str, where: str, message: str, hint: str) -> None:
    (problem,) = problems(text, environ={"SET": "x"})
    assert problem.where == f"job.yaml:{where}"
    assert message in problem.message
    assert hint in (problem.hint or "")


def test_outputs_lie_beside_what_is_sent(tmp_path: Path) -> None:
    (problem,) = problems(f"script: train.py\noutputs: {tmp_path}/")
    assert problem.where == "job.yaml:2:10" and "is workdir itself" in problem.message


def test_all_mistakes_come_at_once_in_the_order_of_the_file() -> None:
    found = problems("""\
        launcher: horovod
        trainer:
          modle: digits_cnn
          data: digts
          batch: {global: many}
        env:
          A: 1
          A: 2
        grace: -3
        secrets: [NOT_SET]
        cluster:
          instances: [a, a]
          gpus_per_instance: none
    """)
    assert [problem.where.removeprefix("job.yaml:") for problem in found] == [
        "1:11",  # launcher
        "2:1",  # trainer lacks model
        "2:1",  # trainer lacks epochs
        "3:3",  # modle
        "5:19",  # global
        "8:3",  # A a second time
        "9:8",  # grace
        "10:11",  # NOT_SET
        "12:18",  # a a second time
        "13:22",  # gpus_per_instance
    ]


def test_of_a_line_the_wrong_keys_and_the_wrong_values_are_told_where_they_stand() -> None:
    line = "cluster: {instances: 1, devise: cpu, ports: 9-3, ssh: {port: 0, usr: eva}}"
    found = problems(f"script: train.py\n{line}")
    assert [problem.where for problem in found] == [f"job.yaml:2:{line.index(word) + 1}" for word in ("devise", "9-3", "0,", "usr")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "cluster: {instances: [{host: a, gpus: [1, 1]}, {host: b, gpus: 0}, {host: c, gpu: 1}, {gpus: 0}, [d], -x]}",
            ["gpus[1]", "instances[1].gpus", "'gpu'", "lacks the key 'host'", "instances[4] must be", "'-x'"],
        ),
        ("secrets: [NOPE, RANK, {a: b}]", ["NOPE", "RANK", "secrets[2] must be text"]),
        ("cluster: {instances: 1, gpus_per_instance: [0, x, -1]}", ["[1] must be a whole number"]),  # no number would stand for it
        ("command: [[a], b]\nargs: [c, [d]]", ["command[0]", "args[1]"]),
    ],
)
def test_a_wrong_item_hides_no_other(text: str, found: list[str]) -> None:
    told = problems(text if "command" in text else f"script: train.py\n{text}")
    assert len(told) == len(found)
    for problem, words in zip(told, found, strict=True):
        assert words in problem.message or (words == "gpus[1]" and "GPU 1 stands here a second time" in problem.message)


def test_mistakes_of_the_job_and_of_its_cluster_file_come_together() -> None:
    Path("lab.yaml").write_text("instances: [a]\ndevise: cpu\n")
    found = problems("script: trian.py\ncluster: lab.yaml\n")
    assert [problem.where for problem in found] == ["job.yaml:1:9", "lab.yaml:2:1"]


def test_a_path_is_shown_as_the_user_gave_it(tmp_path: Path) -> None:
    Path("sub").mkdir()
    Path("sub/job.yaml").write_text("x: 1\nscript: a.py\ncluster: ../lab.yaml\n")
    Path("lab.yaml").write_text("y: 1\ninstances: 1\n")
    for given in (Path("sub/job.yaml"), tmp_path / "sub/job.yaml"):
        with pytest.raises(SpecError) as caught:
            load_job(given)
        assert [problem.where for problem in caught.value.problems] == [f"{given}:1:1", f"{given}:2:9", f"{given.parent}/../lab.yaml:1:1"]


def test_arguments_are_refused_for_a_trainer() -> None:
    (problem,) = problems(TRAINER, arguments=("--epochs", "4"))
    assert (problem.where, problem.message) == ("-- ARG...", "a trainer takes no arguments")


def test_an_argument_or_variable_that_is_not_utf8_is_refused() -> None:
    bad = os.fsdecode(b"\xff")
    found = problems("script: train.py\nenv: {A: }\nsecrets: [B]", arguments=(bad,), environ={"A": bad, "B": bad})
    assert [problem.where for problem in found] == ["job.yaml:2:7", "job.yaml:3:11", "-- ARG..."]
