"""Packed linear layers: what they compute, when they are packed, and that they follow their weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from sglang_acache.models import packed_linear
from sglang_acache.models.packed_linear import PackedLinearMethod, pack_linear_layers


def model_of(dtype: torch.dtype, *, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [ReplicatedLinear(*sizes, bias=bias, params_dtype=dtype) for sizes in ((40, 72), (72, 24))]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    return nn.Sequential(*layers)


def check(layer: ReplicatedLinear, rows: int, tolerance: float) -> None:
    x = torch.randn(rows, layer.input_size).to(layer.weight.dtype)
    out, _ = layer(x)
    bias = None if layer.bias is None else layer.bias.double()
    expected = nn.functional.linear(x.double(), layer.weight.double(), bias)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_product(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    model = model_of(dtype, bias=bias)
    if pack_linear_layers(model) == 0:
        pytest.skip("this processor has no oneDNN for the format")
    for layer in model:
        assert isinstance(layer.quant_method, PackedLinearMethod)
        for rows in (0, 1, 33, 300):
            check(layer, rows, tolerance)


def test_packing_again_follows_the_weights() -> None:
    model = model_of(torch.float32)
    assert pack_linear_layers(model) == 2
    with torch.no_grad():
        model[0].weight.mul_(-3)
    assert pack_linear_layers(model) == 2
    check(model[0], 5, 1e-5)


def test_not_where_a_second_copy_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.float32)
    assert pack_linear_layers(model) == 2
    monkeypatch.setattr(packed_linear.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert pack_linear_layers(model) == 0
    assert all(type(layer.quant_method) is UnquantizedLinearMethod for layer in model)
    check(model[0], 5, 1e-5)


def test_other_formats_are_left_alone() -> None:
    assert pack_linear_layers(model_of(torch.float16)) == 0
