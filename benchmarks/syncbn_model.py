"""The networks of `syncbn.py`, and a SyncBatchNorm written out by hand for CPU tensors, which torch's refuses."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.syncbn_names import TORCHVISION

CLASSES = 100


@dataclass(frozen=True)
class Shape:
    """A residual network of basic blocks: channels of each stage, blocks per stage, and whether it begins as for ImageNet."""

    widths: tuple[int, ...]
    blocks: int
    large_images: bool = False


# He et al. 2015: ResNet-20 is their network for 32 x 32 images, ResNet-18 their smallest for 224 x 224. "tiny" is for tests.
OWN = {
    "tiny": Shape((4, 8), 1),
    "resnet20": Shape((16, 32, 64), 3),
    "resnet18": Shape((64, 128, 256, 512), 2, large_images=True),
}


def has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def build(name: str) -> nn.Module:
    """The network with ordinary BatchNorm layers, on the CPU. Raises ImportError for torchvision's where that is not installed."""
    if name != TORCHVISION:
        return ResNet(OWN[name])
    from torchvision.models import resnet50

    model: nn.Module = resnet50(num_classes=CLASSES)
    return model


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3, 1)
        changes = stride != 1 or inputs != outputs
        self.around = _convolution(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second(torch.relu(self.first(x)))
        return torch.relu(inner + self.around(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """A residual network as `shape` says; every convolution is followed by BatchNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        first = shape.widths[0]
        self.stem = nn.Sequential(_convolution(3, first, 7 if shape.large_images else 3, 2 if shape.large_images else 1))
        self.pool = nn.MaxPool2d(3, 2, 1) if shape.large_images else nn.Identity()
        blocks, inputs = [], first
        for stage, width in enumerate(shape.widths):
            for number in range(shape.blocks):
                blocks.append(Block(inputs, width, 2 if stage and not number else 1))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(inputs, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(torch.relu(self.stem(x))))
        return self.classify(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def synchronised(model: nn.Module, group: Any, *, device: str) -> nn.Module:
    """`model` with its BatchNorm layers synchronised over `group`: torch's own on GPUs, the written-out one on the CPU."""
    if device == "cpu":
        return written_out(model, group)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)


def written_out(model: nn.Module, group: Any) -> nn.Module:
    """`model` with every BatchNorm2d replaced by `WrittenOut` over `group`; None computes the same without exchanging."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            layer = WrittenOut(child.num_features, child.eps, child.momentum, group)
            layer.load_state_dict(child.state_dict())
            setattr(model, name, layer)
        else:
            written_out(child, group)
    return model


class WrittenOut(nn.BatchNorm2d):
    """SyncBatchNorm with the collectives of torch's on gloo: an all_gather of (mean, variance, count), an all_reduce backward."""

    def __init__(self, features: int, eps: float, momentum: float | None, group: Any) -> None:
        super().__init__(features, eps, momentum)
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.group)
        with torch.no_grad():
            share = self.momentum if self.momentum is not None else 0.1
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * count / (count - 1), share)
            self.num_batches_tracked += 1
        return output  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """The statistics over all ranks, and the gradient through them. Sums are kept in float32."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, group: Any) -> Any:
        values, dims = x.float(), (0, 2, 3)
        variance, mean = torch.var_mean(values, dims, unbiased=False)
        count = torch.full((1,), float(values.numel() // values.shape[1]))
        if group is not None:
            own = torch.cat([mean, variance, count])
            gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, own, group=group)
            means, variances, counts = torch.stack(gathered).split([len(mean), len(mean), 1], dim=1)
            count = counts.sum(0)
            mean = (means * counts).sum(0) / count
            variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normal = (values - _wide(mean)) * _wide(inverse)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return (normal * _wide(weight) + _wide(bias)).to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        normal, weight, inverse, count = ctx.saved_tensors
        g, dims = gradient.float(), (0, 2, 3)
        own = torch.cat([g.sum(dims), (g * normal).sum(dims)])
        total = own
        if ctx.group is not None:
            total = own.clone()
            dist.all_reduce(total, group=ctx.group)
        sum_g, sum_gn = (total / count).chunk(2)
        back = (g - _wide(sum_g) - normal * _wide(sum_gn)) * _wide(weight * inverse)
        grad_bias, grad_weight = own.chunk(2)  # of this rank: DDP averages them as it does all parameters' gradients
        return back.to(gradient.dtype), grad_weight, grad_bias, None, None


def _wide(per_channel: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, 1, 1)
