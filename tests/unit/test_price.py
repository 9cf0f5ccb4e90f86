"""The price of a step: buckets as DDP makes them, seconds from what was measured, and no price out of nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ray_nccl_guard import estimate_step_cost
from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.price import Curve, gradient_buckets, sentence
from tests.unit.report_cases import GLOO_S, all_well, cured, fell_back, refused

MIB = 1 << 20
REPORT = {"all_reduce_s": {"4": 0.001, str(MIB): 0.002, str(25 * MIB): 0.026}, "world_size": 4, "backend_chosen": "gloo"}


@dataclass
class Tensor:
    count: int
    size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    requires_grad: bool = True

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return self.size


class SyncBatchNorm:
    def __init__(self, num_features: int) -> None:
        self.num_features = num_features


class Model:
    """What a model looks like to the price: torch itself is compared with in tests/process/test_price_torch.py."""

    def __init__(self, *parameters: Tensor, buffers=(), norms=()) -> None:
        self.of, self.held, self.norms = parameters, buffers, norms

    def parameters(self):
        return iter(self.of)

    def buffers(self):
        return iter(self.held)

    def modules(self):
        return iter([self, *self.norms])


def test_buckets_fill_from_the_last_parameter_with_a_small_first_one():
    layers = [Tensor(MIB) for _ in range(20)]  # 4 MiB each
    assert gradient_buckets(layers) == (4 * MIB, 28 * MIB, 28 * MIB, 20 * MIB)
    assert gradient_buckets(layers, bucket_cap_mb=10) == (12 * MIB,) * 6 + (8 * MIB,)
    assert gradient_buckets([Tensor(10)]) == (40,) and gradient_buckets([]) == ()


def test_each_type_has_buckets_of_its_own():
    assert sorted(gradient_buckets([Tensor(100), Tensor(100, 2, "bfloat16"), Tensor(50)])) == [200, 600]


def test_seconds_lie_on_straight_lines_between_what_was_measured_and_beyond():
    curve = Curve({4: 0.001, MIB: 0.002, 25 * MIB: 0.026})
    assert curve.seconds(1) == 0.001 and curve.seconds(MIB) == pytest.approx(0.002)
    assert curve.seconds(13 * MIB) == pytest.approx(0.014)
    assert curve.seconds(50 * MIB) == pytest.approx(0.051)


def test_noise_never_makes_more_bytes_cheaper():
    curve = Curve({4: 0.003, MIB: 0.002})
    assert curve.seconds(100 * MIB) >= 0.003
    assert Curve({MIB: 0.002}).seconds(10 * MIB) == pytest.approx(0.02)


def test_a_step_costs_its_buckets_its_buffers_and_two_rounds_for_each_sync_batch_norm():
    model = Model(Tensor(MIB // 4), buffers=[Tensor(1), Tensor(1, 8, "int64")], norms=[SyncBatchNorm(0), SyncBatchNorm(0)])
    cost = estimate_step_cost(model, REPORT)
    assert cost.buckets == (MIB,) and cost.gradients_s == pytest.approx(0.002)
    assert cost.buffers_s == pytest.approx(2 * 0.001, rel=0.01)
    assert cost.sync_batch_norm_s == pytest.approx(4 * 0.001, rel=0.01), "latency, four times"
    assert cost.seconds == pytest.approx(cost.gradients_s + cost.buffers_s + cost.sync_batch_norm_s)
    assert estimate_step_cost(model, REPORT, broadcast_buffers=False).buffers_s == 0
    assert "on gloo" in str(cost)


def test_frozen_parameters_cost_nothing():
    assert estimate_step_cost(Model(Tensor(MIB, requires_grad=False)), REPORT).seconds == 0


def test_a_report_a_value_and_its_json_give_the_same_price():
    report, model = fell_back(), Model(Tensor(10 * MIB))
    assert estimate_step_cost(model, report) == estimate_step_cost(model, report.to_json())
    assert estimate_step_cost(model, report).measured_bytes == max(GLOO_S)


@pytest.mark.parametrize("report", [refused(), {"world_size": 2, "backend_chosen": "nccl"}])
def test_without_a_measurement_there_is_no_price(report):
    with pytest.raises(UsageError, match="no measured all_reduce"):
        estimate_step_cost(Model(Tensor(1)), report)


def test_the_sentence_compares_only_what_was_measured():
    assert "nccl never finished one" in sentence(fell_back())
    assert "nccl without the setting was not measured" in sentence(cured())
    assert sentence(refused()) == "" and "nccl" in sentence(all_well())
