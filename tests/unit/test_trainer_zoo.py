"""Names of models and data sets, and the devices of workers: what works, and what is said when it does not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtrain.trainers.digits import digits, digits_cnn
from dtrain.trainers.errors import DeviceError, TargetError
from dtrain.trainers.examples import examples_of
from dtrain.trainers.text import text
from dtrain.trainers.world import choose_device
from dtrain.trainers.zoo import DATASETS, MODELS, Kind, resolve, target_of


@pytest.fixture
def my_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path, as a user's working directory is."""
    (tmp_path / "my_task_of_test.py").write_text("def build():\n    return 7\n\nNUMBER = 5\n")
    (tmp_path / "broken_task_of_test.py").write_text("import a_module_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def test_every_built_in_name_leads_to_its_function() -> None:
    for name in MODELS:
        assert isinstance(resolve("model", name)(), torch.nn.Module)
    for name, dataset in DATASETS.items():
        train, test = resolve("data", name)()
        assert (len(train), len(test)) == (dataset.num_train, dataset.num_test)


def test_the_digits_are_split_alike_for_every_digit() -> None:
    train, test = digits()
    for digit in range(10):
        num_train, num_test = (int((part.tensors[1] == digit).sum()) for part in (train, test))
        assert num_test / (num_train + num_test) == pytest.approx(0.2, abs=0.01)
    images = {bytes(image.numpy().tobytes()) for image in train.tensors[0]}
    assert not any(bytes(image.numpy().tobytes()) in images for image in test.tensors[0])
    assert digits_cnn()(test.tensors[0]).shape == (360, 10)


def test_the_text_is_python_source_and_tests_what_training_never_sees() -> None:
    train, test = text()
    for part in (train, test):
        inputs, labels = part.tensors
        assert inputs.shape[1] == labels.shape[1] == 64
        assert torch.equal(inputs.flatten()[1:], labels.flatten()[:-1])  # a label is the next byte
    source = bytes(train.tensors[0].flatten().tolist())
    assert b"\nimport " in source and b"def " in source
    held_out = bytes(test.tensors[0].flatten().tolist())
    lines = [line for line in held_out.splitlines() if len(line) > 50]
    assert sum(line in source for line in lines) < len(lines) / 10  # some files have a line in common


def test_the_users_own_function_is_found(my_task: Path) -> None:
    assert resolve("model", "my_task_of_test:build")() == 7


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("model", "digit_cnn", "model: there is no built-in 'digit_cnn'\nhint: did you mean 'digits_cnn'?"),
        ("data", "imagenet", "data: there is no built-in 'imagenet'\nhint: built in: digits, text; your own is package.module:function"),
        ("data", "a.b:c.d", "data: 'a.b:c.d' is not of the form package.module:function\nhint: for example my_task:build"),
        ("model", "my_task_of_test:biuld", "has no 'biuld'\nhint: did you mean 'my_task_of_test:build'?"),
        ("model", "my_task_of_test:NUMBER", "is of type int, which cannot be called"),
        (
            "model",
            "no_such_module:build",
            "that does not exist: no_such_module\nhint: it is looked for as no_such_module.py in ",
        ),
        ("model", "no_such_package.models:build", "a module that does not exist: no_such_package\n"),
    ],
)
def test_a_wrong_target_says_what_where_and_what_next(kind: Kind, name: str, message: str, my_task: Path) -> None:
    with pytest.raises(TargetError) as error:
        resolve(kind, name)
    assert message in str(error.value)


def test_a_mistake_inside_the_users_module_stays_the_users_own_error(my_task: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        resolve("model", "broken_task_of_test:build")


def test_names_are_known_and_batches_planned_without_torch() -> None:
    modules = "dtrain.trainers.zoo, dtrain.trainers.batch, dtrain.trainers.layout, dtrain.bench.config, dtrain.bench.bandwidth"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=20, check=True).stdout == "False\n"
    assert target_of("model", "digits_cnn") == "dtrain.trainers.digits:digits_cnn"


def test_without_scikit_learn_the_digits_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('this stands for a missing scikit-learn')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from dtrain.trainers.digits import digits; digits()"
    result = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=30, check=False)
    assert "TargetError: data: 'digits' comes with scikit-learn" in result.stderr
    assert result.stderr.endswith("hint: pip install 'dtrain[examples]'\n")


@pytest.mark.parametrize(
    ("wanted", "num_cuda_devices", "local_rank", "device"),
    [(None, 0, 3, "cpu"), ("", 0, 0, "cpu"), ("cpu", 8, 1, "cpu"), (None, 8, 7, "cuda:7"), ("cuda", 2, 1, "cuda:1")],
)
def test_a_worker_takes_the_gpu_of_its_local_rank(wanted: str | None, num_cuda_devices: int, local_rank: int, device: str) -> None:
    assert choose_device(wanted, num_cuda_devices=num_cuda_devices, local_rank=local_rank) == device


@pytest.mark.parametrize(
    ("wanted", "num_cuda_devices", "message"),
    [("cuda", 0, "local rank 2 has no GPU: torch sees 0"), (None, 2, "torch sees 2 on this node"), ("tpu", 0, "DTRAIN_DEVICE is 'tpu'")],
)
def test_a_worker_without_its_gpu_says_so(wanted: str | None, num_cuda_devices: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        choose_device(wanted, num_cuda_devices=num_cuda_devices, local_rank=2)


def test_a_data_set_of_another_shape_is_refused() -> None:
    with pytest.raises(TargetError, match=r"data: x, train: a set has no len\(\) and \[\]"):
        examples_of({1}, name="data: x, train")
    with pytest.raises(TargetError, match="no examples in it"):
        examples_of([], name="data: x")
    with pytest.raises(TargetError, match="3 tensors"):
        examples_of(torch.utils.data.TensorDataset(*[torch.ones(2)] * 3), name="data: x")
    with pytest.raises(TargetError, match=r"an example is not \(input, label\)"):
        examples_of([torch.ones(3)], name="data: x").take(torch.tensor([0]))
