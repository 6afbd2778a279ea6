"""LeNet-5 is the network of the paper, for any image size, and it learns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude.config import lookup
from etude.core.errors import ConfigError
from etude.models import LeNet5


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_paper_has_61706_parameters():
    assert count(LeNet5()) == 61_706
    assert count(LeNet5(input_shape=(1, 32, 32), padding=0)) == 61_706


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 12, 12), (2, 17, 30)])
@pytest.mark.parametrize("pooling", ["max", "average"])
def test_any_shape_that_is_large_enough(shape, pooling):
    model = LeNet5(num_classes=7, input_shape=shape, pooling=pooling)
    assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(20,), (28, 28), (2, 1, 28, 28)])
def test_samples_that_are_no_images(shape):
    with pytest.raises(ConfigError, match=r"channels, height, width.*\["):
        LeNet5(input_shape=shape)


@pytest.mark.parametrize(
    ("shape", "padding", "least"), [((1, 11, 28), 2, 12), ((1, 28, 11), 2, 12), ((3, 15, 15), 0, 16)]
)
def test_images_that_are_too_small(shape, padding, least):
    message = f"lenet5 with padding {padding} needs images of at least {least}×{least}, found input_shape"
    with pytest.raises(ConfigError, match=message):
        LeNet5(input_shape=shape, padding=padding)
    enough = (shape[0], least, least)
    assert LeNet5(input_shape=enough, padding=padding)(torch.zeros(1, *enough)).shape == (1, 10)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("pooling", ["max", "average"])
def test_the_layers_are_those_of_the_paper(activation, pooling):
    model = LeNet5(activation=activation, pooling=pooling).double()
    act = torch.relu if activation == "relu" else torch.tanh
    pool = F.max_pool2d if pooling == "max" else F.avg_pool2d
    weights = dict(model.named_parameters())
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    padded = F.pad(images, (2, 2, 2, 2))
    first = F.conv2d(padded, weights["conv1.weight"], weights["conv1.bias"])
    first = pool(act(first), 2) if pooling == "max" else act(pool(first, 2))
    second = F.conv2d(first, weights["conv2.weight"], weights["conv2.bias"])
    second = pool(act(second), 2) if pooling == "max" else act(pool(second, 2))
    hidden = second.reshape(3, 400)
    for name in ("fc1", "fc2"):
        hidden = act(hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
    torch.testing.assert_close(model(images), hidden @ weights["fc3.weight"].T + weights["fc3.bias"])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_parameters_have_the_type_and_images_are_cast_to_it(dtype):
    model = LeNet5(dtype=dtype)
    expected = getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model(torch.randn(2, 1, 28, 28)).dtype == expected
    assert model(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).dtype == expected
    assert model.double()(torch.randn(2, 1, 28, 28)).dtype == torch.float64


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model, images = LeNet5(dropout=0.5), torch.randn(4, 1, 28, 28)
    assert not model(images).equal(model(images))
    model.eval()
    assert model(images).equal(model(images))
    model = LeNet5()
    assert model(images).equal(model(images))


def test_it_learns_where_a_spot_is():
    torch.manual_seed(0)
    labels = torch.arange(160) % 4
    images = 0.3 * torch.randn(160, 1, 28, 28)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 6 + 14 * (label // 2), 6 + 14 * (label % 2)
        image[0, row - 2 : row + 3, column - 2 : column + 3] += 1.5
    model = LeNet5(num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for step in range(60):
        part = slice(32 * (step % 4), 32 * (step % 4) + 32)
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    held_out = slice(128, 160)
    assert (model(images[held_out]).argmax(1) == labels[held_out]).float().mean() > 0.9


def test_it_is_registered_with_its_data():
    component = lookup("model", "lenet5")
    assert component.factory is LeNet5
    assert component.companions == {"data": {"name": "mnist"}}
    assert isinstance(component.factory(num_classes=3), nn.Module)
