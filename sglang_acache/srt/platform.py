"""The plain-CPU platform: lets an ordinary SGLang wheel serve where there is no accelerator."""

from __future__ import annotations

from typing import Any

CPU_KV_TOKENS = 65_536
"""Default K/V pool size on a CPU, in tokens; without a cap SGLang would size it to most of the machine's memory."""


def activate() -> str | None:
    """Entry point of ``sglang.srt.platforms``: our platform where torch sees no accelerator, else None."""
    import os

    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # the user asked for SGLang's own CPU build

    accelerated = torch.cuda.is_available() or torch.xpu.is_available() or hasattr(torch, "npu")
    return None if accelerated else f"{__name__}.{_platform_class().__name__}"


def _platform_class() -> type:
    """Built on first use: importing SGLang's platform package while it resolves platforms would be circular."""
    existing = globals().get("PlainCpuPlatform")
    if isinstance(existing, type):
        return existing

    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
        # OOT keeps SGLang's core off its vllm, sgl_kernel and CUDA branches; the CPU engine of the wheel needs libcuda.
        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_device(self, device_id: int = 0) -> str:
            return "cpu"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def apply_server_args_defaults(self, server_args: Any) -> None:
            apply_cpu_defaults(server_args)

    PlainCpuPlatform.__qualname__ = "PlainCpuPlatform"
    globals()["PlainCpuPlatform"] = PlainCpuPlatform
    return PlainCpuPlatform


def apply_cpu_defaults(server_args: Any) -> None:
    """Fill in what the user left unset and a CPU needs."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    if server_args.attention_backend is None:
        server_args.attention_backend = "torch_native"
    if server_args.dtype == "auto":
        server_args.dtype = "float32"
    if server_args.max_total_tokens is None:
        server_args.max_total_tokens = CPU_KV_TOKENS
    server_args.sleep_on_idle = True
    graphs = server_args.cuda_graph_config
    for phase in (Phase.DECODE, Phase.PREFILL):
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    server_args.cuda_graph_config = graphs
