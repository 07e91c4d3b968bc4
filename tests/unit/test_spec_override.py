"""What the command line says instead of the files: typed as in a file, and answered at the option."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from dtrain.bench.config import AllreduceConfig
from dtrain.cli.job_file import check_job_file
from dtrain.errors import SpecError
from dtrain.spec import JobSpec, Overrides, Script, benchmark_job, load_job, this_machine
from dtrain.trainers.config import BatchConfig, PipelineConfig, TrainerConfig

TRAINER = """\
trainer:
  model: digits_cnn
  data: digits
  epochs: 3
"""
CLUSTER = """\
instances:
- n1
- trn[01-03]
- {host: n5, gpus: 1}
gpus_per_instance: 4
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("eval.py").touch()
    Path("lab.yaml").write_text(CLUSTER)


def job(text: str, *settings: str, **others: object) -> JobSpec:
    Path("job.yaml").write_text(textwrap.dedent(text))
    return load_job(Path("job.yaml"), Overrides(settings=settings, **others), environ={"HOME_OF_DATA": "/data"})  # type: ignore[arg-type]


def trainer(*settings: str) -> TrainerConfig:
    run = job(TRAINER, *settings).run
    assert isinstance(run, TrainerConfig)
    return run


def test_a_setting_is_as_if_the_file_said_so() -> None:
    assert trainer("trainer.learning_rate=1e-3", "trainer.batch.global=64", "trainer.batch.micro_batches=4") == TrainerConfig(
        "digits_cnn", "digits", BatchConfig(global_=64, micro_batches=4), epochs=3, learning_rate=0.001
    )
    assert trainer("trainer.pipeline={stages: 2}", "trainer.batch={global: 64, micro_batches: 4}").pipeline == PipelineConfig(stages=2)
    spec = job("script: train.py\nenv: {A: 1}", "env.A=08", "env.B='on'", "env.HOME_OF_DATA=", "args=[a, 1.10]", "sync=true", "name=n")
    assert (spec.env, spec.run, spec.name) == (
        {"A": "08", "B": "on", "HOME_OF_DATA": "/data"},
        Script("train.py", ("a", "1.10")),
        "n",
    )


@pytest.mark.parametrize("text", ["a #b", "#b", " a", "a: b", "{a: b}", "[x", "*", "%d", "&x", "!x", "- a", "a\nb", "~", "`x`", "it's"])
def test_a_variable_is_set_as_it_is_typed(text: str) -> None:
    assert job("script: train.py", f"env.A={text}").env == {"A": text}


def test_an_empty_setting_takes_away_what_the_file_says() -> None:
    assert trainer("trainer.epochs=", "trainer.iterations=7").iterations == 7
    assert job(TRAINER, "trainer=", "script=train.py").run == Script("train.py", ())
    assert job("script: train.py\ncluster: lab.yaml", "cluster=").cluster == this_machine()


@pytest.mark.parametrize(
    "line", ["outputs: o", "grace: 1", "launcher: mpirun", "args: a", "setup: s", "env: {A: 1}", "name: n", "cluster: 2"]
)
def test_an_empty_setting_is_as_if_the_key_were_not_in_the_file(line: str) -> None:
    assert job(f"script: train.py\n{line}", f"{line.partition(':')[0]}=") == job("script: train.py")


@pytest.mark.parametrize(
    "line", ["gpus_per_instance: 4", "device: cpu", "dir: /d", "network: eth0", "ports: 1-2", "ssh: {user: u}", "only: [a]"]
)
def test_an_empty_setting_is_as_if_the_key_were_not_in_the_clusters_file(line: str) -> None:
    Path("lab.yaml").write_text(f"instances: [a, b]\n{line}")
    without = job("script: train.py\ncluster: lab.yaml", f"cluster.{line.partition(':')[0]}=")
    Path("lab.yaml").write_text("instances: [a, b]")
    assert without == job("script: train.py\ncluster: lab.yaml")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer=", "nothing says what to run"),
        ("trainer.model=", "trainer lacks the key 'model'"),
        ("trainer.epochs=", "trainer lacks one of epochs and iterations"),
        ("cluster.instances=", "lacks the key 'instances'"),
        ("outptus=", "unknown key 'outptus'"),
    ],
)
def test_what_an_empty_setting_leaves_missing_is_answered_at_the_option(setting: str, message: str) -> None:
    for cluster in ("cluster: {instances: [n1, n2]}", "cluster: lab.yaml"):
        with pytest.raises(SpecError) as caught:
            job(TRAINER + cluster, setting)
        (problem,) = caught.value.problems
        assert problem.where == f"--set {setting[:-1]}"
        assert message in problem.message


def test_an_item_of_a_list_is_named_by_its_number_in_the_file() -> None:
    """A range is one item, and a host that stands by itself becomes a mapping for its other keys."""
    spec = job("script: train.py\ncluster: lab.yaml", "cluster.instances.1.gpus=2", "cluster.instances.0.ssh.port=23")
    assert [(i.name, i.gpus, i.ssh.port) for i in spec.cluster.instances] == [
        ("n1", 4, 23),
        ("trn01", 2, None),
        ("trn02", 2, None),
        ("trn03", 2, None),
        ("n5", 1, None),
    ]
    assert job("script: train.py\nargs: [a, b]", "args.1=c").run == Script("train.py", ("a", "c"))


@pytest.mark.parametrize(
    ("cluster", "others"),
    [
        ("cluster: lab.yaml", {}),
        ("cluster: {instances: [n1, n2], gpus_per_instance: 4}", {}),
        ("cluster: {instances: [x]}", {"cluster": Path("lab.yaml")}),
        ("cluster: nowhere.yaml", {"cluster": Path("lab.yaml")}),
    ],
    ids=["file", "inline", "option over inline", "option over file"],
)
def test_settings_of_the_cluster_go_where_the_cluster_stands(cluster: str, others: dict[str, object]) -> None:
    spec = job(f"script: train.py\n{cluster}", "cluster.gpus_per_instance=2", "cluster.device=cpu", **others)
    assert (spec.cluster.instances[0].name, spec.cluster.instances[0].gpus, spec.cluster.device) == ("n1", 2, "cpu")


def test_without_a_cluster_its_settings_mean_this_machine() -> None:
    spec = job("script: train.py", "cluster.gpus_per_instance=3")
    assert [(i.name, i.host, i.gpus) for i in spec.cluster.instances] == [("node0", None, 3)]
    assert len(job("script: train.py", "cluster.instances=4").cluster.instances) == 4


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"nodes": "n5,n1"}, ["n1", "n5"]),  # in the order of the file, so that ranks stay where they were
        ({"nodes": "trn[01,03],n1"}, ["n1", "trn01", "trn03"]),
        ({"exclude": "trn[01-03]"}, ["n1", "n5"]),
        ({"exclude": "n1, n5"}, ["trn01", "trn02", "trn03"]),
    ],
)
def test_nodes_are_chosen_by_name(options: dict[str, object], names: list[str]) -> None:
    assert [i.name for i in job("script: train.py\ncluster: lab.yaml", **options).cluster.instances] == names


def test_what_was_overridden_is_kept_as_typed() -> None:
    spec = job("script: train.py", "env.A=two words", cluster=Path("lab.yaml"), exclude="n1", arguments=("--lr", "1 2"))
    assert spec.overrides == ("--cluster lab.yaml", "--exclude n1", "--set 'env.A=two words'", "-- --lr '1 2'")
    assert job("script: train.py").overrides == ()


def test_a_benchmark_takes_settings_of_its_cluster() -> None:
    lab = benchmark_job(Path("lab.yaml"), AllreduceConfig(), Overrides(nodes="n1,n5", settings=("cluster.gpus_per_instance=2",)))
    assert [(i.name, i.gpus) for i in lab.cluster.instances] == [("n1", 2), ("n5", 1)]
    here = benchmark_job(None, AllreduceConfig(), Overrides(settings=("cluster.instances=2", "cluster.device=cpu")))
    assert [i.name for i in here.cluster.instances] == ["node0", "node1"]
    assert benchmark_job(None, AllreduceConfig()).cluster == this_machine()
    with pytest.raises(SpecError) as caught:
        benchmark_job(Path("lab.yaml"), AllreduceConfig(), Overrides(settings=("grace=3", "cluster.dir=x")))
    assert str(caught.value).startswith("--set grace: only a cluster is measured\nhint: ")


# (what is set, where the mistake is, a part of the message, a part of the hint)
WRONG = [
    ("trainer.epochs=1.5", "--set trainer.epochs", "trainer.epochs must be a whole number, not '1.5'", "digits"),
    ("trainer.epochs='3'", "--set trainer.epochs", "not '3'", "remove the quotes"),
    ("trainer.batch=64", "--set trainer.batch", "trainer.batch must be a mapping, not '64'", "write `batch: {global: 64}`"),
    ("trainer.epochs=0", "--set trainer.epochs", "trainer.epochs must be at least 1, not 0", "1"),
    ("trainer.epoch=3", "--set trainer.epoch", "unknown key 'epoch'", "did you mean 'epochs'?"),
    ("trainer.batch={globl: 3}", "--set trainer.batch", "unknown key 'globl'", "did you mean 'global'?"),
    ("trainer.iterations=5", "--set trainer.iterations", "both epochs and iterations", "keep one"),
    ("script=train.py", "--set script", "script and trainer stand here", "keep one"),
    ("launcher=mpiexec", "--set launcher", "launcher must be", "did you mean 'mpirun'?"),
    ("trainer.model.layers=3", "--set trainer.model.layers", "trainer.model is the text 'digits_cnn', which has no 'layers'", "as a whole"),
    ("cluster.instances.7.gpus=2", "--set cluster.instances.7.gpus", "instances is a list and has no item '7'", "0 to 2"),
    ("cluster.instance.1.gpus=2", "--set cluster.instance.1.gpus", "there is no instance", "did you mean 'cluster.instances'?"),
    ("cluster.instances.n1.gpus=2", "--set cluster.instances.n1.gpus", "has no item 'n1'", "0 to 2"),
    ("cluster.instances[1].gpus=2", "--set cluster.instances[1].gpus", "by its number alone", "cluster.instances.1.gpus"),
    ("cluster.instances.1.gpu=2", "--set cluster.instances.1.gpu", "unknown key 'gpu'", "did you mean 'gpus'?"),
    ("cluster.instances=[trn[1-2]]", "--set cluster.instances", "expected ',' or ']'", 'wants quotes: ["trn[01-16].lab"]'),
    ("cluster.instances=n1,n2", "--set cluster.instances", "not 'n1,n2'", "write [n1, n2]"),
    ("cluster.instances.0=", "--set cluster.instances.0", "instances[0] cannot be taken out of its list", "--set cluster.instances=[...]"),
    ("args.0=x", "--set args.0", "no args is there, to set an item of", "--set args=[...]"),
    ("env.A.B=1", "--set env.A.B", "'A.B' cannot be a variable's name", "A_B"),
    ("name=a #b", "--set name", "what stands behind '#' is a comment", "quotes"),
    ('env.A="q" #z: 1', "--set env.A", "what stands behind '#' is a comment", "quotes"),
    ("args=[a] #b", "--set args", "what stands behind '#' is a comment", "quotes"),
    ("cluster.instances=[n1, n1]", "--set cluster.instances", "the host 'n1' stands here a second time", "remove one"),
    ("cluster.devise=cpu", "--set cluster.devise", "unknown key 'devise'", "did you mean 'device'?"),
    ("name=a: b", "--set name", "mapping values are not allowed", "quotes"),
    ("name=@x", "--set name", "cannot start any token", "quotes"),
    ("name=*x", "--set name", "alias", "quotes"),
    ("name=a\nsync: false", "--set name", "second line", "quotes"),
    ("grace=3\nx: 4", "--set grace", "second line", "quotes"),
    ('env.A="a\\0b"', "--set env.A", "NUL", "remove"),
    (os.fsdecode(b"name=\xff"), "--set name", "not UTF-8", "UTF-8"),
    ("env.RANK=0", "--set env.RANK", "RANK", "$RANK"),
    ("trainer." + "a." * 3000 + "a=1", "--set trainer." + "a." * 16 + "...", "names a place more than 20 levels deep", "no key"),
    ("grace", "--set grace", "is not KEY=VALUE", "--set trainer.learning_rate=0.01"),
    ("=3", "--set ", "is not KEY=VALUE", "such as"),
    ("trainer..epochs=3", "--set trainer..epochs", "is not KEY=VALUE", "such as"),
]


@pytest.mark.parametrize(("setting", "where", "message", "hint"), WRONG, ids=[ascii(row[0]) for row in WRONG])
def test_a_wrong_setting_is_answered_at_the_option(setting: str, where: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(TRAINER + "cluster: lab.yaml", setting)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert message in problem.message
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    ("options", "where", "message", "hint"),
    [
        ({"nodes": "n1,n6"}, "--nodes", "the cluster has no node 'n6'", "its nodes: n1, trn01, trn02, trn03, n5"),
        ({"nodes": "n6,n7"}, "--nodes", "the cluster has no node 'n6' (nor 1 other of these)", "its nodes"),
        ({"nodes": "trn01-trn03"}, "--nodes", "no node 'trn01-trn03'", "a range is written trn[01-03]"),
        ({"exclude": "n1-5"}, "--exclude", "no node 'n1-5'", "a range is written n[1-5]"),
        ({"nodes": "gpu7"}, "--nodes", "the cluster has no node 'gpu7'", "its nodes: n1, trn01"),
        ({"exclude": "trn[1-9]"}, "--exclude", "no node 'trn1' (nor 8 others of these)", "did you mean 'trn01'?"),
        ({"exclude": "n[1,5],trn[01-03]"}, "--exclude", "no node is left", "leave some"),
        ({"nodes": "n1,,n5"}, "--nodes", "a name is missing", "gpu1,gpu2"),
        ({"exclude": "n1 n5"}, "--exclude", "'n1 n5' is no node's name", "separate names by commas: n1,n5"),
        ({"cluster": Path("n1.lab")}, "--cluster", "the cluster file 'n1.lab' is not there", "write `cluster: {instances: [n1.lab]}`"),
        ({"nodes": ""}, "--nodes", "a name is missing", "gpu1,gpu2"),
        ({"nodes": "n[5-1]"}, "--nodes", "'n[5-1]' has the range 5-1, which counts down", "write 1-5"),
        ({"nodes": "a[1-4096]," * 9999 + "n1"}, "--nodes", "more than 4096 names stand here", "write each once"),
        ({"nodes": "n1", "exclude": "n5"}, "--exclude", "--nodes and --exclude stand here", "keep one"),
        ({"cluster": Path("lba.yaml")}, "--cluster", "the cluster file 'lba.yaml' is not there", "did you mean 'lab.yaml'?"),
        ({"cluster": Path("cluster.yaml")}, "--cluster", "the cluster file 'cluster.yaml' is not there", "instances: [node1, node2]"),
        ({"cluster": Path(".")}, "--cluster", "the cluster '.' is a folder", "name a file in it"),
        ({"cluster": Path("job.yaml")}, "--cluster", "the cluster 'job.yaml' is a job file", "instances"),
    ],
)
def test_a_wrong_option_is_answered_at_the_option(options: dict[str, object], where: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        job("script: train.py\ncluster: lab.yaml", **options)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert message in problem.message
    assert hint in (problem.hint or "")


def test_mistakes_of_files_and_options_come_together_in_their_order() -> None:
    with pytest.raises(SpecError) as caught:
        job(
            "script: trian.py\ncluster: lab.yaml\ngrace: -1",
            *("name=/", "grace=-2", "cluster.instances.1.gpus=0", "launcher=x", "name=b"),
            nodes="gone",
        )
    assert [problem.where for problem in caught.value.problems] == [
        "job.yaml:1:9",
        "--set grace",
        "--set launcher",
        "--set cluster.instances.1.gpus",
        "--set name",  # a second time; what it says the first time no longer counts
    ]


def test_an_argument_that_no_process_can_be_given_is_refused() -> None:
    with pytest.raises(SpecError, match=r"-- ARG...: the argument 'xx.* has 140,001 bytes"):
        job("script: train.py", arguments=("x" * 140_000,))


def test_a_current_folder_that_was_removed_is_a_plain_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (tmp_path / "job.yaml").write_text("script: train.py")
    for read in (
        lambda: check_job_file(Path("job.yaml")),
        lambda: load_job(tmp_path / "job.yaml", Overrides(cluster=Path("lab.yaml")), environ={}),
    ):
        with pytest.raises(SpecError, match=r"\.yaml: the current folder was removed\nhint: go into one"):
            read()
    check_job_file(Path("x" * 300 + ".py"))  # for load_job to answer


def test_another_cluster_and_a_setting_of_the_cluster_as_a_whole_exclude_each_other() -> None:
    with pytest.raises(SpecError, match=r"--set cluster: --cluster names another cluster"):
        job("script: train.py", "cluster={instances: 2}", cluster=Path("lab.yaml"))
