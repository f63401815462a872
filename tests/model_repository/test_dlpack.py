"""DLPack of a model.py: tensors of other frameworks, and capsules, as Triton's own examples hand them over."""

import sys
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.python_backend.stub import pb_utils
from millrace.model_repository.python_backend.stub.errors import TritonModelException
from millrace.model_repository.python_backend.stub.tensors import Tensor, numpy_to_triton_type


class Other:
    """A framework's tensor: no array, and all that is asked of it are DLPack's two methods."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int16, np.int64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("way", [lambda a: a, Other, lambda a: a.__dlpack__()], ids=["array", "other", "capsule"])
def test_what_comes_in_shares_its_memory(kind: Any, way: Any) -> None:
    array = np.arange(12).astype(kind).reshape(3, 4)
    for given in (array, array.T, array[1:, ::2]):
        tensor = Tensor.from_dlpack("x", way(given))
        assert (tensor.name(), tensor.shape()) == ("x", list(given.shape))
        assert np.array_equal(tensor.as_numpy(), given) and tensor.as_numpy().dtype == kind
        assert tensor.triton_dtype() == numpy_to_triton_type(kind)
    tensor = Tensor.from_dlpack("x", way(array))
    if tensor._array.flags.writeable:
        array[0, 0] = 1
        assert tensor.as_numpy()[0, 0] == array[0, 0]


def test_what_goes_out() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = Tensor("x", array)
    assert tensor.is_cpu() and tensor.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(tensor), array)
    assert np.array_equal(Tensor.from_dlpack("y", tensor.to_dlpack()).as_numpy(), array)
    array.flags.writeable = False  # as what a request brings is: a model gets its own
    mine = np.from_dlpack(Tensor("x", array))
    assert np.array_equal(mine, array) and not np.shares_memory(mine, array)


def test_strings_do_not_go_out() -> None:
    tensor = Tensor("x", np.array(["An Example String"], dtype=np.object_))
    for give in (tensor.to_dlpack, lambda: np.from_dlpack(tensor)):
        with pytest.raises(TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
            give()


@pytest.mark.parametrize("what", [None, b"x", [1.0], object()])
def test_what_is_no_tensor(what: Any) -> None:
    with pytest.raises(TritonModelException, match="what tensor 'x' is made of is no tensor on the CPU: "):
        Tensor.from_dlpack("x", what)


def test_configurations_by_name() -> None:
    config = {"input": [{"name": "A", "dims": [1]}, {"name": "B"}], "output": [{"name": "A", "dims": [2]}]}
    assert pb_utils.get_input_config_by_name(config, "A") == {"name": "A", "dims": [1]}
    assert pb_utils.get_output_config_by_name(config, "A") == {"name": "A", "dims": [2]}
    assert (
        pb_utils.get_input_config_by_name(config, "C") is None and pb_utils.get_output_config_by_name({}, "A") is None
    )


def test_bf16_of_torch_goes_in_and_out() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.dlpack import from_dlpack, to_dlpack

    theirs = torch.tensor([[1.0, -2.5], [3.140625, 1e30]], dtype=torch.bfloat16)
    for given in (theirs, to_dlpack(theirs), theirs.T, theirs[1:]):
        tensor = Tensor.from_dlpack("x", given)
        assert tensor.triton_dtype() == 14
    tensor = Tensor.from_dlpack("x", theirs)
    assert tensor.as_numpy().astype(np.float32).tolist() == theirs.float().tolist()
    theirs[0, 0] = 7.0
    assert float(tensor.as_numpy()[0, 0]) == 7.0, "memory is shared"
    for back in (torch.from_dlpack(tensor), from_dlpack(tensor.to_dlpack())):
        assert back.dtype == torch.bfloat16 and torch.equal(back, theirs)
        back[1, 0] = 0.5
        assert float(theirs[1, 0]) == 0.5, "and so is that of what goes out"
    assert Tensor.from_dlpack("y", tensor.to_dlpack()).as_numpy().tolist() == tensor.as_numpy().tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64", "uint8", "bool"])
def test_tensors_of_torch_go_in_and_out(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    tensor = Tensor.from_dlpack("x", theirs)
    assert tensor.as_numpy().tolist() == theirs.tolist()
    assert torch.equal(torch.from_dlpack(tensor), theirs)


def test_what_goes_out_keeps_its_tensor() -> None:
    tensor = Tensor("x", np.arange(4, dtype=np.float32))
    before = sys.getrefcount(tensor)
    capsule = tensor.to_dlpack()
    assert sys.getrefcount(tensor) == before + 1
    del capsule
    assert sys.getrefcount(tensor) == before
    seen = np.from_dlpack(tensor)
    del tensor
    assert seen.tolist() == [0, 1, 2, 3]
